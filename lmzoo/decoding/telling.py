"""Text while it comes: token by token into pieces of text, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no character yet
LONGEST = 4  # tokens that a character may be spread over: bytes of UTF-8


class Teller:
    """One row's text, handed to ``tell`` piece by piece; what may turn out to begin a stop string is held back.

    A token's text can depend on what stands before it (a space, half a character), so each is decoded together with
    the ones before it: at first those of the prompt, ``before``, then those of the last piece.
    """

    def __init__(self, tokenizer, before: Iterable[int], stop: Sequence[str], tell: Callable[[str], object]):
        self.tokenizer, self.stop, self.tell = tokenizer, stop, tell
        self.ids, self.held, self.ended = list(before), "", False
        self.n_told = len(self.ids)  # of the ids

    def take(self, id: int, ends: bool = False) -> bool:
        """Go on with ``id``, the row's last one if it ``ends``; return whether the row has ended."""
        if self.ended:
            return True
        if id not in self.tokenizer.special_ids:
            self.ids.append(id)
            self.held += self.piece(ends)
        found = [at for at in map(self.held.find, self.stop) if at >= 0]
        if found:
            self.held = self.held[: min(found)]
        self.say(all_of_it=bool(found) or ends)
        self.ended = bool(found) or ends
        return self.ended

    def piece(self, ends: bool) -> str:
        """The text of the ids that are new, if they are whole characters or never will be."""
        known, text = self.tokenizer.decode(self.ids[: self.n_told]), self.tokenizer.decode(self.ids)
        n_new = len(self.ids) - self.n_told
        if not ends and (len(text) <= len(known) or text.endswith(UNFINISHED) and n_new < LONGEST):
            return ""
        self.ids, self.n_told = self.ids[self.n_told :], n_new
        return text[len(known) :]

    def say(self, all_of_it: bool) -> None:
        held_back = 0 if all_of_it else max(map(len, self.stop), default=1) - 1
        end = max(0, len(self.held) - held_back)
        if end:
            self.tell(self.held[:end])
        self.held = self.held[end:]

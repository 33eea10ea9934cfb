//! The values of trials of transactions. Each has a tag, an amount and the elements of a list, and proves itself: all
//! other bytes follow from these, so torn or foreign bytes are detected.
//!
//! ```text
//! value | tag u64 | amount i64 | number of elements u64 | element u64 ... | check u64 | filler |
//! ```
//!
//! The filler is that of a value of [`values`] with the same tag and the filler's length.

use crate::values;
use farside_sim::history::register::Value;

/// Length of a value without elements and filler, in bytes.
pub(super) const LEN_MIN: usize = 32;
/// Length of an element in bytes.
pub(super) const ELEMENT_LEN: usize = 8;

/// A decoded value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) tag: u64,
    pub(super) amount: i64,
    pub(super) elements: Vec<u64>,
}

impl Item {
    /// Returns the bytes of the value, with this number of bytes of filler.
    pub(super) fn encode(&self, filler: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LEN_MIN + self.elements.len() * ELEMENT_LEN + filler);
        let head = [self.tag, self.amount as u64, self.elements.len() as u64];
        let words = head.iter().chain(&self.elements).copied().chain([self.check()]);
        words.for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        bytes.extend(values::bytes(Value { tag: self.tag, len: filler as u32 }));
        bytes
    }

    /// Decodes a value. Returns `None` if no value has these bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Item> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |at: usize| words.get(at).map(|word| u64::from_le_bytes(*word));
        let count = usize::try_from(word(2)?).ok().filter(|count| *count < words.len())?;
        let elements = (3..3 + count).map(word).collect::<Option<Vec<u64>>>()?;
        let item = Item { tag: word(0)?, amount: word(1)? as i64, elements };
        let filler = bytes.len().checked_sub(LEN_MIN + count * ELEMENT_LEN)?;
        (item.encode(filler) == bytes).then_some(item)
    }

    fn check(&self) -> u64 {
        let words = [self.tag, self.amount as u64].into_iter().chain(self.elements.iter().copied());
        words.fold(0, |check, word| values::mixed(check ^ word))
    }
}

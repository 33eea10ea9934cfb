//! Values that prove themselves: all bytes of a value follow from its tag, so a torn or foreign value is detected.

use farside_sim::history::register::Value;

/// Returns the bytes of a value, which follow from its tag and length.
pub fn bytes(value: Value) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(value.len as usize + 8);
    let mut word = value.tag;
    while bytes.len() < value.len as usize {
        bytes.extend_from_slice(&word.to_le_bytes());
        word = mixed(word ^ u64::from(value.len) << 40);
    }
    bytes.truncate(value.len as usize);
    bytes
}

/// Returns the value that has these bytes, or `None` if no value has them.
pub fn known(found: &[u8]) -> Option<Value> {
    let tag = u64::from_le_bytes(found.get(..8)?.try_into().ok()?);
    let value = Value { tag, len: found.len() as u32 };
    (bytes(value) == found).then_some(value)
}

/// Encodes a short value in one word. The word is never 0.
pub(super) fn word(value: Value) -> u64 {
    value.tag << 16 | u64::from(value.len)
}

/// Decodes the value that a word encodes.
pub(super) fn of_word(word: u64) -> Value {
    Value { tag: word >> 16, len: word as u32 & 0xffff }
}

/// Returns a word that follows from another one, and differs from it in about half of the bits.
pub(super) fn mixed(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) ^ word >> 31
}

/// Length of the longest key in bytes, of keys with at most 4 digits.
pub(super) const KEY_LEN_MAX: usize = 48;

/// Returns the bytes of a key. The lengths of keys vary with their number.
pub(super) fn key(number: u64) -> Vec<u8> {
    format!("key {number}{}", ".".repeat(number as usize % 5 * 9)).into_bytes()
}

//! Fields of an object, and how numbers lie in its bytes.
//!
//! Invariant: fields do not overlap, and lie within the object.

use farside_sim::memory::LINE;
use std::ops::Range;

/// Maximum size of an object in bytes.
pub const SIZE_MAX: usize = 16 << 10;
/// Maximum size in bytes of a field that holds a number.
const NUMBER_MAX: usize = 8;

/// A field: one place in the object, or several at equal distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name of the field.
    pub name: String,
    /// Offset of the first byte.
    pub at: usize,
    /// Size in bytes of a copy.
    pub len: usize,
    /// Number of copies.
    pub copies: usize,
    /// Distance in bytes from the start of a copy to that of the next.
    pub every: usize,
    /// Whether the bytes are the value that is written and read. Otherwise they hold numbers of the protocol.
    pub is_data: bool,
}

impl Field {
    /// Range of a copy's bytes.
    pub fn copy(&self, index: usize) -> Range<usize> {
        let at = self.at + index * self.every;
        at..at + self.len
    }

    /// Ranges of all copies' bytes, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.copies).map(|index| self.copy(index))
    }

    /// Range from the first byte of the first copy to the last byte of the last copy.
    pub fn span(&self) -> Range<usize> {
        self.at..self.copy(self.copies - 1).end
    }

    /// Whether the field's bytes can be a number.
    pub fn is_number(&self) -> bool {
        !self.is_data && self.len <= NUMBER_MAX
    }

    /// Name of a copy.
    pub fn name_of(&self, index: usize) -> String {
        if self.copies == 1 { self.name.clone() } else { format!("{}[{index}]", self.name) }
    }
}

/// Reads a number of at most 8 bytes, the lowest byte first.
pub fn number(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Stores the lowest bytes of a number.
pub fn store(bytes: &mut [u8], number: u64) {
    let len = bytes.len();
    bytes.copy_from_slice(&number.to_le_bytes()[..len]);
}

/// Checks the fields of an object of `size` bytes. Returns the name of the field that is wrong, and the reason with the
/// remedy.
///
/// # Errors
/// A field is outside of the object, overlaps another or itself, or its name is taken.
pub fn check(fields: &[Field], size: usize) -> Result<(), (String, String)> {
    let mut owners = vec![None; size];
    for (place, field) in fields.iter().enumerate() {
        let Field { name, at, len, copies, every, .. } = field;
        let wrong = |reason: String| Err((name.clone(), reason));
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        if !name.starts_with(|letter: char| letter.is_ascii_alphabetic()) || !name.chars().all(is_name) {
            return wrong(format!("'{name}' is no name: use letters, digits and _, and begin with a letter"));
        }
        if RESERVED.contains(&name.as_str()) {
            return wrong(format!("the name '{name}' has a meaning of its own: name the field otherwise"));
        }
        if *len == 0 || *copies == 0 {
            return wrong(format!("field '{name}' has no bytes: give it a len and copies of at least 1"));
        }
        if *copies > 1 && every < len {
            return wrong(format!(
                "the copies of field '{name}' overlap: its every is {every}, and must be at least its len, {len}"
            ));
        }
        let end = (copies - 1).checked_mul(*every).and_then(|end| end.checked_add(*at)?.checked_add(*len));
        if end.is_none_or(|end| end > size) {
            let end = end.map_or("2^64".to_owned(), |end| end.to_string());
            return wrong(format!(
                "field '{name}' ends at byte {end}, beyond the object's {size}: lower at, len or copies, or raise size"
            ));
        }
        for byte in field.ranges().flatten() {
            if let Some(other) = owners[byte].replace(place) {
                let other = &fields[other].name;
                return wrong(format!(
                    "fields '{other}' and '{name}' both have byte {byte}: move one of them"
                ));
            }
        }
    }
    Ok(())
}

/// Words with a meaning in expressions and steps.
pub(super) const RESERVED: [&str; 15] = [
    "all", "any", "and", "or", "not", "true", "false", "crc64", "as", "else", "post", "fence", "set",
    "check", "update",
];

/// Numbers of the first and the last cache line that these bytes touch.
pub fn lines(bytes: &Range<usize>) -> (usize, usize) {
    let line = LINE as usize;
    (bytes.start / line, (bytes.end - 1) / line)
}

/// Names the cache lines that these bytes touch: `line 2` or `lines 0 to 2`.
pub fn lines_text(bytes: &Range<usize>) -> String {
    match lines(bytes) {
        (first, last) if first == last => format!("line {first}"),
        (first, last) => format!("lines {first} to {last}"),
    }
}

//! Lines and lengths, of which both protocols are made.
//!
//! Invariant: whatever the bytes are, nothing here panics.

use super::ANSWER_BYTES_MAX;

/// The longest line of an answer.
pub(super) const LINE_MAX: usize = 4096;
const END: &[u8] = b"\r\n";

/// The first line of `bytes`, without its end; nothing if that has not come.
///
/// # Errors
/// It is longer than any line may be.
#[inline]
pub(super) fn line(bytes: &[u8]) -> Result<Option<&[u8]>, String> {
    let end = bytes.iter().take(LINE_MAX).position(|&byte| byte == b'\n');
    match end {
        Some(end) if end > 0 && bytes[end - 1] == b'\r' => Ok(Some(&bytes[..end - 1])),
        None if bytes.len() < LINE_MAX => Ok(None),
        _ => Err(format!("it answers with a line that does not end as lines do: {}", shown(bytes))),
    }
}

/// The number that is written in `digits`.
#[inline]
pub(super) fn number(digits: &[u8]) -> Option<u64> {
    const DIGITS_MAX: usize = 18;
    if digits.is_empty() || digits.len() > DIGITS_MAX {
        return None;
    }
    digits
        .iter()
        .try_fold(0, |number, digit| digit.is_ascii_digit().then(|| number * 10 + u64::from(digit - b'0')))
}

/// The `len` bytes that follow a line of `line` bytes, and how many that is with both ends; nothing if they have not
/// all come.
///
/// # Errors
/// There are too many, or they do not end there.
#[inline]
pub(super) fn block(bytes: &[u8], line: usize, len: u64) -> Result<Option<(&[u8], usize)>, String> {
    let len = usize::try_from(len).ok().filter(|&len| len <= ANSWER_BYTES_MAX).ok_or_else(|| {
        format!("it answers with a value of {len} bytes, and no value here has more than {ANSWER_BYTES_MAX}")
    })?;
    let first = line + END.len();
    let last = first + len;
    match bytes.get(last..last + END.len()) {
        None => Ok(None),
        Some(END) => Ok(Some((&bytes[first..last], last + END.len()))),
        Some(_) => Err(format!("a value that it answers does not end after its {len} bytes")),
    }
}

/// For people: the beginning of an answer.
pub(super) fn shown(bytes: &[u8]) -> String {
    const SHOWN_MAX: usize = 120;
    let line = bytes.split(|&byte| byte == b'\r').next().expect("there is a part before the first of them");
    format!("'{}'", line[..line.len().min(SHOWN_MAX)].escape_ascii())
}

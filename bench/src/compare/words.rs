//! Parsers of lines, numbers and blocks, which both protocols use.
//!
//! Invariant: no input makes a function of this module panic.

use super::ANSWER_BYTES_MAX;

/// Maximum length of a line of an answer, in bytes.
pub(super) const LINE_MAX: usize = 4096;
const END: &[u8] = b"\r\n";

/// Returns the first line of `bytes`, without its CRLF; `None` if the line is incomplete.
///
/// # Errors
/// The line is longer than [`LINE_MAX`], or ends without a CR.
#[inline]
pub(super) fn line(bytes: &[u8]) -> Result<Option<&[u8]>, String> {
    let end = bytes.iter().take(LINE_MAX).position(|&byte| byte == b'\n');
    match end {
        Some(end) if end > 0 && bytes[end - 1] == b'\r' => Ok(Some(&bytes[..end - 1])),
        None if bytes.len() < LINE_MAX => Ok(None),
        _ => Err(format!("a line of the answer does not end in CRLF: {}", shown(bytes))),
    }
}

/// Parses a decimal number; `None` if the digits are not one.
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

/// Returns the `len` bytes after a line of `line` bytes, and the total length in bytes with both CRLFs; `None` if
/// these bytes are incomplete.
///
/// # Errors
/// The block is too long, or does not end in CRLF.
#[inline]
pub(super) fn block(bytes: &[u8], line: usize, len: u64) -> Result<Option<(&[u8], usize)>, String> {
    let len = usize::try_from(len).ok().filter(|&len| len <= ANSWER_BYTES_MAX).ok_or_else(|| {
        format!("the answer has a value of {len} bytes, more than the limit of {ANSWER_BYTES_MAX}")
    })?;
    let first = line + END.len();
    let last = first + len;
    match bytes.get(last..last + END.len()) {
        None => Ok(None),
        Some(END) => Ok(Some((&bytes[first..last], last + END.len()))),
        Some(_) => Err(format!("a value of the answer does not end after its {len} bytes")),
    }
}

/// Returns the start of an answer, quoted for an error message.
pub(super) fn shown(bytes: &[u8]) -> String {
    const SHOWN_MAX: usize = 120;
    let line = bytes.split(|&byte| byte == b'\r').next().expect("split yields at least one part");
    format!("'{}'", line[..line.len().min(SHOWN_MAX)].escape_ascii())
}

//! memcached over its text protocol: one `get` of many keys, and one `set` for each write.
//!
//! Invariant: keys have 8 bytes, like those of our systems. They are the hexadecimal digits of the record's number,
//! because this protocol requires printable keys.

use super::words::{block, line, number, shown};
use super::{Answer, Dialect};

/// Dialect that sends one `get` for all reads of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Memcached;

/// Number of distinct keys of 8 hexadecimal digits.
pub const RECORDS_MAX: u64 = 1 << 32;

impl Dialect for Memcached {
    const HELLO: &'static [u8] = b"stats\r\n";

    fn pid(bytes: &[u8]) -> Result<Option<u32>, String> {
        let (mut rest, mut pid) = (bytes, None);
        while let Some(first) = line(rest)? {
            if first == b"END" {
                return pid.map(Some).ok_or_else(|| "the server does not report its process id".to_owned());
            }
            let Some(reported) = first.strip_prefix(b"STAT ") else {
                return Err(format!("unexpected answer to stats: {}", shown(first)));
            };
            if let Some(digits) = reported.strip_prefix(b"pid ") {
                pid = number(digits).and_then(|pid| u32::try_from(pid).ok());
            }
            rest = &rest[first.len() + 2..];
        }
        Ok(None)
    }

    #[inline]
    fn encode_reads(keys: &[u64], out: &mut Vec<u8>) {
        out.extend_from_slice(b"get");
        for &number in keys {
            out.push(b' ');
            out.extend_from_slice(&key(number));
        }
        out.extend_from_slice(b"\r\n");
    }

    #[inline]
    fn encode_write(number: u64, value: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(b"set ");
        out.extend_from_slice(&key(number));
        out.extend_from_slice(format!(" 0 0 {}\r\n", value.len()).as_bytes());
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }

    /// Parses the answer to one read. The server omits absent records from its answer. So where the answer for an
    /// absent record would be, the parser finds the next record or the end of the answer.
    #[inline]
    fn read(bytes: &[u8], asked: u64) -> Result<Option<Answer<'_>>, String> {
        let Some(first) = line(bytes)? else { return Ok(None) };
        if first == b"END" {
            return Ok(Some(Answer { len: 0, value: None }));
        }
        let refused = || format!("unexpected answer to a get: {}", shown(first));
        let rest = first.strip_prefix(b"VALUE ").ok_or_else(refused)?;
        let mut words = rest.split(|&byte| byte == b' ');
        let (Some(name), Some(_flags), Some(len), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(refused());
        };
        if name != key(asked) {
            return Ok(Some(Answer { len: 0, value: None }));
        }
        let found = block(bytes, first.len(), number(len).ok_or_else(refused)?)?;
        Ok(found.map(|(value, len)| Answer { len, value: Some(value) }))
    }

    #[inline]
    fn after_reads(bytes: &[u8]) -> Result<Option<usize>, String> {
        expect(bytes, b"END", "after all items of a get")
    }

    #[inline]
    fn written(bytes: &[u8]) -> Result<Option<usize>, String> {
        expect(bytes, b"STORED", "to a set")
    }
}

#[inline]
fn expect(bytes: &[u8], word: &[u8], asked: &str) -> Result<Option<usize>, String> {
    match line(bytes)? {
        None => Ok(None),
        Some(reported) if reported == word => Ok(Some(word.len() + 2)),
        Some(other) => Err(format!("unexpected answer {asked}: {}", shown(other))),
    }
}

/// Key of record `number`.
#[inline]
fn key(number: u64) -> [u8; 8] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    std::array::from_fn(|place| DIGITS[(number >> (28 - 4 * place)) as usize & 15])
}

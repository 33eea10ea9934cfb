//! Redis over the protocol RESP: pipelined GETs, or one MGET, and SETs.
//!
//! Invariant: keys are the same 8 bytes as for our systems.

use super::words::{block, line, number, shown};
use super::{Answer, Dialect};
use crate::workload::key;

/// Dialect that sends a GET for each read.
#[derive(Clone, Copy, Debug)]
pub struct Get;

/// Dialect that sends one MGET for all reads of a batch.
#[derive(Clone, Copy, Debug)]
pub struct MGet;

impl Dialect for Get {
    const HELLO: &'static [u8] = b"*2\r\n$4\r\nINFO\r\n$6\r\nserver\r\n";

    fn pid(bytes: &[u8]) -> Result<Option<u32>, String> {
        let Some(Answer { value, .. }) = bulk(bytes)? else { return Ok(None) };
        let text = value.unwrap_or_default();
        let reported = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"process_id:"));
        let pid = reported.and_then(|pid| number(pid.trim_ascii())).and_then(|pid| u32::try_from(pid).ok());
        pid.map(Some).ok_or_else(|| format!("the server does not report its process id: {}", shown(text)))
    }

    #[inline]
    fn encode_reads(keys: &[u64], out: &mut Vec<u8>) {
        for &number in keys {
            out.extend_from_slice(b"*2\r\n$3\r\nGET\r\n");
            encode_key(number, out);
        }
    }

    #[inline]
    fn encode_write(number: u64, value: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(b"*3\r\n$3\r\nSET\r\n");
        encode_key(number, out);
        out.extend_from_slice(format!("${}\r\n", value.len()).as_bytes());
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }

    #[inline]
    fn read(bytes: &[u8], _: u64) -> Result<Option<Answer<'_>>, String> {
        bulk(bytes)
    }

    #[inline]
    fn written(bytes: &[u8]) -> Result<Option<usize>, String> {
        match line(bytes)? {
            None => Ok(None),
            Some(b"+OK") => Ok(Some(b"+OK\r\n".len())),
            Some(other) => Err(format!("unexpected answer to a write: {}", shown(other))),
        }
    }
}

impl Dialect for MGet {
    const HELLO: &'static [u8] = Get::HELLO;

    fn pid(bytes: &[u8]) -> Result<Option<u32>, String> {
        Get::pid(bytes)
    }

    #[inline]
    fn encode_reads(keys: &[u64], out: &mut Vec<u8>) {
        out.extend_from_slice(format!("*{}\r\n$4\r\nMGET\r\n", keys.len() + 1).as_bytes());
        keys.iter().for_each(|&number| encode_key(number, out));
    }

    #[inline]
    fn encode_write(number: u64, value: &[u8], out: &mut Vec<u8>) {
        Get::encode_write(number, value, out);
    }

    #[inline]
    fn before_reads(bytes: &[u8], count: usize) -> Result<Option<usize>, String> {
        let Some(first) = line(bytes)? else { return Ok(None) };
        match first.strip_prefix(b"*").and_then(number) {
            Some(reported) if reported == count as u64 => Ok(Some(first.len() + 2)),
            _ => Err(format!("unexpected answer to an MGET of {count} keys: {}", shown(first))),
        }
    }

    #[inline]
    fn read(bytes: &[u8], _: u64) -> Result<Option<Answer<'_>>, String> {
        bulk(bytes)
    }

    #[inline]
    fn written(bytes: &[u8]) -> Result<Option<usize>, String> {
        Get::written(bytes)
    }
}

/// Dialect that stores the records of `redis-benchmark -r` in a separate database, so that they do not enlarge the
/// table of the other records.
#[derive(Clone, Copy, Debug)]
pub struct OfBenchmark;

impl OfBenchmark {
    /// Number of the separate database.
    pub const DATABASE: &'static str = "1";
}

impl Dialect for OfBenchmark {
    const HELLO: &'static [u8] = b"*2\r\n$6\r\nSELECT\r\n$1\r\n1\r\n*2\r\n$4\r\nINFO\r\n$6\r\nserver\r\n";

    fn pid(bytes: &[u8]) -> Result<Option<u32>, String> {
        match Get::written(bytes)? {
            Some(selected) => Get::pid(&bytes[selected..]),
            None => Ok(None),
        }
    }

    fn encode_reads(numbers: &[u64], out: &mut Vec<u8>) {
        for number in numbers {
            out.extend_from_slice(format!("*2\r\n$3\r\nGET\r\n$16\r\nkey:{number:012}\r\n").as_bytes());
        }
    }

    fn encode_write(number: u64, value: &[u8], out: &mut Vec<u8>) {
        let asked = format!("*3\r\n$3\r\nSET\r\n$16\r\nkey:{number:012}\r\n${}\r\n", value.len());
        out.extend_from_slice(asked.as_bytes());
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }

    fn read(bytes: &[u8], _: u64) -> Result<Option<Answer<'_>>, String> {
        bulk(bytes)
    }

    fn written(bytes: &[u8]) -> Result<Option<usize>, String> {
        Get::written(bytes)
    }
}

#[inline]
fn encode_key(number: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(b"$8\r\n");
    out.extend_from_slice(&key(number));
    out.extend_from_slice(b"\r\n");
}

/// Parses a bulk string of RESP, which may be null.
#[inline]
fn bulk(bytes: &[u8]) -> Result<Option<Answer<'_>>, String> {
    let Some(first) = line(bytes)? else { return Ok(None) };
    let len = match first.strip_prefix(b"$") {
        Some(b"-1") => return Ok(Some(Answer { len: first.len() + 2, value: None })),
        Some(digits) => number(digits),
        None => None,
    };
    let len = len.ok_or_else(|| format!("unexpected answer to a read: {}", shown(first)))?;
    let found = block(bytes, first.len(), len)?;
    Ok(found.map(|(value, len)| Answer { len, value: Some(value) }))
}

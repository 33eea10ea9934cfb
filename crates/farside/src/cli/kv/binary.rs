//! Keys and values in a binary file, in which a lost or changed byte is noticed, and a lost end as well.
//!
//! ```text
//! file:    | magic 93 'farside' | version u32 = 1 | zero u32 | records ... | end |
//! record:  | key length u32 | value length u32 | check u64 | key | value |
//! end:     | zero u32       | zero u32         | check u64 | count u64 |
//! ```
//!
//! Numbers are little-endian. A check is the CRC-64/NVME of the record's number (u64, from 0), both lengths, key and
//! value; that of the end has the count for its number. Invariant: what was decoded was written in this very place.

use crc_fast::{CrcAlgorithm, Digest};
use farside::{KEY_MAX, VALUE_MAX};
use std::io::{self, Write};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What a file begins with.
pub(super) const MAGIC: [u8; 8] = *b"\x93farside";
const VERSION: u32 = 1;

/// What is said of a file that begins otherwise.
pub(super) const OTHER: &str =
    "it does not begin like a binary dump: name its format by --format tsv or jsonl";

/// The beginning of a file.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    version: U32,
    zero: U32,
}

/// The beginning of a record, or of the end.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RecordHead {
    key_len: U32,
    value_len: U32,
    check: U64,
}

pub(super) const HEAD_SIZE: usize = size_of::<Head>();
pub(super) const RECORD_HEAD_SIZE: usize = size_of::<RecordHead>();
pub(super) const COUNT_SIZE: usize = 8;
const _: () = assert!(HEAD_SIZE == 16 && RECORD_HEAD_SIZE == 16);

/// What follows the head of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A key and a value of so many bytes each.
    Pair { key_len: usize, value_len: usize, check: u64 },
    /// The count, of [`COUNT_SIZE`] bytes.
    End { check: u64 },
}

/// Writes what a file begins with.
pub(super) fn write_head(out: &mut impl Write) -> io::Result<()> {
    out.write_all(Head { magic: MAGIC, version: VERSION.into(), zero: 0.into() }.as_bytes())
}

/// Writes the record of that number. Key and value are such as a store has.
pub(super) fn write_record(out: &mut impl Write, number: u64, key: &[u8], value: &[u8]) -> io::Result<()> {
    let (key_len, value_len) = (key.len() as u32, value.len() as u32);
    let check = check_of(number, key, value);
    let head = RecordHead { key_len: key_len.into(), value_len: value_len.into(), check: check.into() };
    out.write_all(head.as_bytes())?;
    out.write_all(key)?;
    out.write_all(value)
}

/// Writes the end of a file with so many records.
pub(super) fn write_end(out: &mut impl Write, count: u64) -> io::Result<()> {
    let head = RecordHead { key_len: 0.into(), value_len: 0.into(), check: check_of(count, b"", b"").into() };
    out.write_all(head.as_bytes())?;
    out.write_all(&count.to_le_bytes())
}

/// Checks what a file begins with.
pub(super) fn check_head(bytes: &[u8]) -> Result<(), String> {
    let head = Head::ref_from_bytes(bytes).ok().filter(|head| head.magic == MAGIC);
    let head = head.ok_or(OTHER)?;
    match (head.version.get(), head.zero.get()) {
        (VERSION, 0) => Ok(()),
        (version, _) => Err(format!(
            "it is of version {version}, and this release knows {VERSION}: use the one that made it"
        )),
    }
}

/// What follows, by the head of a record.
pub(super) fn decode(bytes: &[u8]) -> Result<Next, String> {
    let head = RecordHead::ref_from_bytes(bytes).map_err(|_| "it has no head".to_owned())?;
    let (key_len, value_len) = (head.key_len.get() as usize, head.value_len.get() as usize);
    let check = head.check.get();
    match (key_len, value_len) {
        (0, 0) => Ok(Next::End { check }),
        (1..=KEY_MAX, 0..=VALUE_MAX) => Ok(Next::Pair { key_len, value_len, check }),
        _ => Err(format!("it claims a key of {key_len} bytes and a value of {value_len}: {DAMAGED}")),
    }
}

/// Whether this is what was written as the record of that number; for the end, that with so many before it.
pub(super) fn verify(number: u64, key: &[u8], value: &[u8], check: u64) -> Result<(), String> {
    if check_of(number, key, value) == check {
        Ok(())
    } else {
        Err(format!("its check does not hold: {DAMAGED}"))
    }
}

const DAMAGED: &str = "the file was damaged; use another copy of it";

fn check_of(number: u64, key: &[u8], value: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(&number.to_le_bytes());
    digest.update(&(key.len() as u32).to_le_bytes());
    digest.update(&(value.len() as u32).to_le_bytes());
    digest.update(key);
    digest.update(value);
    digest.finalize()
}

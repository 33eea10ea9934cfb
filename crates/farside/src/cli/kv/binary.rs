//! Encodes and decodes the binary format of keys and values. The format detects lost bytes, changed bytes and
//! truncation.
//!
//! ```text
//! file:    | magic 93 'farside' | version u32 = 1 | zero u32 | records ... | end |
//! record:  | key length u32 | value length u32 | check u64 | key | value |
//! end:     | zero u32       | zero u32         | check u64 | count u64 |
//! ```
//!
//! Numbers are little-endian. A record's check is the CRC-64/NVME of the record's number (u64, from 0), both lengths,
//! the key and the value. The check of the end covers the number of records in place of a record's number.
//! Invariant: a record is accepted only at the position in the file at which it was written.

use crc_fast::{CrcAlgorithm, Digest};
use farside::{KEY_MAX, VALUE_MAX};
use std::io::{self, Write};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of a binary file.
pub(super) const MAGIC: [u8; 8] = *b"\x93farside";
const VERSION: u32 = 1;

/// Error message for a file without [`MAGIC`].
pub(super) const NOT_BINARY: &str =
    "it does not begin like a binary dump: give its format with --format tsv or jsonl";

/// Header of a binary file.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    version: U32,
    zero: U32,
}

/// Header of a record, or of the file's end.
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

/// The part of a file that follows a [`RecordHead`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A key and a value of these lengths in bytes, and their check.
    Pair { key_len: usize, value_len: usize, check: u64 },
    /// The number of records, in [`COUNT_SIZE`] bytes, and its check.
    End { check: u64 },
}

/// Writes the file's header.
pub(super) fn write_head(out: &mut impl Write) -> io::Result<()> {
    out.write_all(Head { magic: MAGIC, version: VERSION.into(), zero: 0.into() }.as_bytes())
}

/// Writes the record with this number, from 0. Key and value must be within the limits of a store.
pub(super) fn write_record(out: &mut impl Write, number: u64, key: &[u8], value: &[u8]) -> io::Result<()> {
    let (key_len, value_len) = (key.len() as u32, value.len() as u32);
    let check = check_of(number, key, value);
    let head = RecordHead { key_len: key_len.into(), value_len: value_len.into(), check: check.into() };
    out.write_all(head.as_bytes())?;
    out.write_all(key)?;
    out.write_all(value)
}

/// Writes the end of a file with `count` records.
pub(super) fn write_end(out: &mut impl Write, count: u64) -> io::Result<()> {
    let head = RecordHead { key_len: 0.into(), value_len: 0.into(), check: check_of(count, b"", b"").into() };
    out.write_all(head.as_bytes())?;
    out.write_all(&count.to_le_bytes())
}

/// Checks that `bytes` are the header of a binary file of a known version.
pub(super) fn check_head(bytes: &[u8]) -> Result<(), String> {
    let head = Head::ref_from_bytes(bytes).ok().filter(|head| head.magic == MAGIC);
    let head = head.ok_or(NOT_BINARY)?;
    match (head.version.get(), head.zero.get()) {
        (VERSION, 0) => Ok(()),
        (version, _) => Err(format!(
            "it has format version {version}, and this release reads {VERSION}: use the release that wrote it"
        )),
    }
}

/// Decodes a record's header, or the header of the file's end.
pub(super) fn decode(bytes: &[u8]) -> Result<Next, String> {
    let head = RecordHead::ref_from_bytes(bytes).map_err(|_| "it has no header".to_owned())?;
    let (key_len, value_len) = (head.key_len.get() as usize, head.value_len.get() as usize);
    let check = head.check.get();
    match (key_len, value_len) {
        (0, 0) => Ok(Next::End { check }),
        (1..=KEY_MAX, 0..=VALUE_MAX) => Ok(Next::Pair { key_len, value_len, check }),
        _ => Err(format!("it claims a key of {key_len} bytes and a value of {value_len}: {DAMAGED}")),
    }
}

/// Checks that key and value were written as the record `number`. For the end of the file, `number` is the number of
/// records, and key and value are empty.
pub(super) fn verify(number: u64, key: &[u8], value: &[u8], check: u64) -> Result<(), String> {
    if check_of(number, key, value) == check {
        Ok(())
    } else {
        Err(format!("its checksum does not match: {DAMAGED}"))
    }
}

const DAMAGED: &str = "the file is damaged; use another copy of it";

fn check_of(number: u64, key: &[u8], value: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(&number.to_le_bytes());
    digest.update(&(key.len() as u32).to_le_bytes());
    digest.update(&(value.len() as u32).to_le_bytes());
    digest.update(key);
    digest.update(value);
    digest.finalize()
}

//! The bytes of the objects of a FaRM store.
//!
//! ```text
//! object   | version u63, lock u1 | transaction that has the lock u64 | content | filler, to whole cache lines |
//! content  | stamp u64 | key length u16 | kind u8 | 0 u8 | value length u32 | key | value |
//! ```
//!
//! All numbers are little-endian. An object consists of lines with versions ([`crate::lines`]).
//!
//! Invariant: the version of an object rises by 1 with each write. The version and the lock are one word, which is
//! changed by an atomic exchange together with the lock's owner.

use super::log::TxnId;
use super::mutants;
use crate::lines::{HEADER_SIZE, Lines};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const _: () = assert!(size_of::<Header>() == HEADER_SIZE);
/// Size of the header of an object's content in bytes.
pub(super) const CONTENT_SIZE: usize = size_of::<ContentHeader>();
const LOCKED: u64 = 1 << 63;

/// Header of an object.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub(super) struct Header {
    version_and_lock: U64,
    pub(super) owner: TxnId,
}

impl Header {
    pub(super) fn free(version: u64) -> Header {
        Header { version_and_lock: U64::new(version & !LOCKED), owner: TxnId::NONE }
    }

    pub(super) fn locked(version: u64, owner: TxnId) -> Header {
        Header { version_and_lock: U64::new(version | LOCKED), owner }
    }

    pub(super) fn version(self) -> u64 {
        self.version_and_lock.get() & !LOCKED
    }

    pub(super) fn is_locked(self) -> bool {
        self.version_and_lock.get() & LOCKED != 0
    }

    /// The header as a word of 16 bytes.
    pub(super) fn word(self) -> u128 {
        u128::from_le_bytes(self.as_bytes().try_into().expect("16 bytes"))
    }

    pub(super) fn of_word(word: u128) -> Header {
        Header::read_from_bytes(&word.to_le_bytes()).expect("16 bytes")
    }
}

/// Header of the content of an object.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ContentHeader {
    stamp: U64,
    key_len: U16,
    kind: u8,
    reserved: u8,
    value_len: U32,
}

/// Kind of a content or write: the key has a value.
pub(super) const VALUE: u8 = 1;
/// Kind of a content or write: the key has no value.
pub(super) const ABSENT: u8 = 2;

/// A decoded content of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content<'a> {
    /// Stamp of the transaction that has written it; 0 if none has.
    pub(super) stamp: u64,
    pub(super) key: &'a [u8],
    /// The value; `None` if the key has none.
    pub(super) value: Option<&'a [u8]>,
}

impl<'a> Content<'a> {
    /// Encodes the content into `out`, which it clears.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let value = self.value.unwrap_or_default();
        let header = ContentHeader {
            stamp: U64::new(self.stamp),
            key_len: U16::new(self.key.len() as u16),
            kind: if self.value.is_some() { VALUE } else { ABSENT },
            reserved: 0,
            value_len: U32::new(value.len() as u32),
        };
        out.clear();
        [header.as_bytes(), self.key, value].into_iter().for_each(|part| out.extend_from_slice(part));
    }

    /// Decodes a content; `None` if no client writes such bytes.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Content<'a>> {
        let (header, rest) = ContentHeader::ref_from_prefix(bytes).ok()?;
        let (key, value) = rest.split_at_checked(header.key_len.get().into())?;
        if value.len() != header.value_len.get() as usize || key.is_empty() {
            return None;
        }
        let value = match header.kind {
            VALUE => Some(value),
            ABSENT if value.is_empty() => None,
            _ => return None,
        };
        Some(Content { stamp: header.stamp.get(), key, value })
    }
}

/// Whether a line is marked while its content changes.
pub(super) fn are_marked(lines: Lines) -> bool {
    lines.are_long() && !mutants::LINES_UNMARKED.is_on()
}

/// Decodes an object, and puts its content into `out`, which it clears. `checks` is false for objects that nobody
/// changes meanwhile.
pub(super) fn decode(lines: Lines, object: &[u8], out: &mut Vec<u8>, checks: bool) -> Reading {
    out.clear();
    let Ok((header, _)) = Header::read_from_prefix(object) else { return Reading::Damaged };
    if header.is_locked() && checks {
        return Reading::Locked(header.owner);
    }
    for (is_current, content) in lines.parts(object, header.version()) {
        if checks && !is_current && !mutants::LINES_UNCHECKED.is_on() {
            return Reading::Torn;
        }
        out.extend_from_slice(content);
        let Ok((content, _)) = ContentHeader::ref_from_prefix(&out[..]) else { continue };
        let len = CONTENT_SIZE + usize::from(content.key_len.get()) + content.value_len.get() as usize;
        if len <= out.len() {
            out.truncate(len);
            return Reading::Whole(header.version());
        }
    }
    Reading::Damaged
}

/// Result of a READ of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// The content of this version.
    Whole(u64),
    /// The object is locked by this transaction.
    Locked(TxnId),
    /// Bytes of several versions.
    Torn,
    /// No client writes such bytes.
    Damaged,
}

#[cfg(test)]
mod tests {
    use super::super::layout::{LINES, Spec};
    use super::*;

    #[test]
    fn an_object_survives_encoding_and_a_line_of_another_version_is_found() {
        for line in LINES {
            let spec = Spec::example(line);
            assert_eq!(spec.check(), Ok(()));
            let (lines, mut content, mut out) = (spec.lines(), Vec::new(), Vec::new());
            for len in [0, 1, 13, 14, 15, 47, 48, 200] {
                let value = vec![9; len];
                let wanted = Content { stamp: 5, key: b"key", value: Some(&value) };
                wanted.encode(&mut content);
                let mut object = Header::free(0x3_0007).as_bytes().to_vec();
                let mut rest = Vec::new();
                lines.encode(0x3_0007, &content, &mut rest);
                object.extend_from_slice(&rest);
                assert_eq!(object.len() % usize::from(line), 0);
                assert!(object.len() as u64 <= spec.object_len());
                let stamp = &object[lines.content_at()..][..8];
                assert_eq!(stamp, 5_u64.to_le_bytes());
                let used = object.len();
                object.resize(spec.object_len() as usize, 0x55);
                assert_eq!(decode(lines, &object, &mut out, true), Reading::Whole(0x3_0007));
                assert_eq!(Content::decode(&out), Some(wanted));
                for torn in (usize::from(line)..used).step_by(line.into()) {
                    let mut object = object.clone();
                    object[torn] ^= 1;
                    assert_eq!(decode(lines, &object, &mut out, true), Reading::Torn);
                }
                object[..HEADER_SIZE].copy_from_slice(Header::locked(7, TxnId::of_bits(9)).as_bytes());
                assert_eq!(decode(lines, &object, &mut out, true), Reading::Locked(TxnId::of_bits(9)));
            }
        }
    }

    #[cfg(farside_mutants)]
    #[test]
    fn a_torn_object_is_returned_if_versions_of_lines_are_not_compared() {
        use farside_remote::mutant::Mutant;
        let (lines, mut content, mut rest) = (Spec::example(16).lines(), Vec::new(), Vec::new());
        Content { stamp: 5, key: b"key", value: Some(&[9; 100]) }.encode(&mut content);
        lines.encode(7, &content, &mut rest);
        let mut object = [Header::free(7).as_bytes(), &rest[..]].concat();
        object[64..66].copy_from_slice(&8_u16.to_le_bytes());
        assert_eq!(decode(lines, &object, &mut content, true), Reading::Torn);
        Mutant::switch(Some(mutants::LINES_UNCHECKED));
        let accepted = decode(lines, &object, &mut content, true);
        Mutant::switch(None);
        assert_eq!(accepted, Reading::Whole(7));
    }
}

//! Objects that a service updates in place, in a table of objects of one size, so that the changes survive the death of
//! the node.
//!
//! ```text
//! object   | version u64 | tag u64 | content, in lines of 16 bytes |                          crate::lines
//! intents  | intent, for odd numbers | intent, for even numbers |
//! intent   | state 40 bytes | bytes of the writes u64 | CRC u64 | 0 u64 | write, x n |
//! state    | number u64 | installs u64 | used u64 | spare u64 | extra u64 |
//! write    | address u64 | version u64 | tag u64 | start 16 bytes | offset u32 | length u32 | bytes |
//! ```
//!
//! All numbers are little-endian. The CRC (CRC-64/NVME) is that of the intent with a CRC of 0.
//!
//! A change consists of a few writes. A write gives an object a version, a tag, the first 16 bytes of its content, and
//! further bytes of its content at an offset. A write with the version 0 puts the 16 bytes of `start` to an address
//! that is no object. The service records the writes of a change in an *intent* before it carries the first of them
//! out. A node that takes over after a failure carries out the last complete intent once more ([`Intents::repair`]).
//!
//! Invariant: a change is carried out before the next intent is written. So the last complete intent is the only one
//! whose writes may be unfinished, and every write may be repeated until the next intent is complete.

use super::called::REQUEST_SIZE;
use crate::lines::{HEADER_SIZE, Lines};
use farside_remote::Memory;
use farside_remote::service::{ADDRESS_SIZE, Extent};
use std::time::Duration;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Longest time of a READ whose lines have one version only if they are of one write. A call takes at least 1 us and
/// writes an object at most twice, so 65,535 writes take longer.
pub(super) const READ_TIME_MAX: Duration = Duration::from_millis(25);
/// Number of bytes at the start of a content that every write replaces.
pub(super) const START: usize = 16;
fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Lines of the objects.
const LINES: Lines = Lines::UNITS;
const CACHE_LINE: u64 = 64;

/// Header of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Header {
    pub(super) version: U64,
    /// A number that the system gives meaning to. It changes with the version only.
    pub(super) tag: U64,
}

const _: () = assert!(size_of::<Header>() == HEADER_SIZE);

impl Header {
    /// The header that the next write gives the object. A client may have written any version, and 0 is none.
    pub(super) fn raised(self) -> Header {
        Header { version: raised(self.version).get().max(1).into(), ..self }
    }
}

/// The number after this one, which a client may have written.
pub(super) fn raised(number: U64) -> U64 {
    number.get().wrapping_add(1).into()
}

/// Returns the number of bytes of an object with a content of this length.
pub(super) fn object_len(content: usize) -> u64 {
    (LINES.image_len(content) as u64).next_multiple_of(CACHE_LINE)
}

/// Decodes an object whose content has this length, and puts the content into `out`, which it clears. Returns `None` if
/// the object has lines of several versions, and `checks` is set.
pub(super) fn decode(object: &[u8], content: usize, out: &mut Vec<u8>, checks: bool) -> Option<Header> {
    out.clear();
    let object = object.get(..LINES.image_len(content))?;
    let (header, _) = Header::read_from_prefix(object).ok()?;
    for (is_current, part) in LINES.parts(object, header.version.get()) {
        if checks && !is_current {
            return None;
        }
        out.extend_from_slice(part);
    }
    out.truncate(content);
    Some(header)
}

/// Numbers of a table's service.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct State {
    /// Number of intents.
    number: U64,
    /// Number of installs: puts and deletes.
    pub(super) installs: U64,
    /// Number of objects that have ever been taken.
    pub(super) used: U64,
    /// First of the objects that were given back, plus 1; 0 if there is none.
    pub(super) spare: U64,
    /// Number of further objects that have ever been taken, in systems with two kinds of objects.
    pub(super) extra: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Recorded {
    state: State,
    len: U64,
    crc: U64,
    reserved: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WriteHead {
    at: U64,
    header: Header,
    start: [u8; START],
    offset: U32,
    len: U32,
}

const RECORDED: usize = size_of::<Recorded>();
const WRITE_HEAD: usize = size_of::<WriteHead>();
const _: () = assert!(RECORDED == 64 && WRITE_HEAD == 48);

/// Number of bytes that a service checksums for a change of one write, in a call with a request of this length.
pub(super) fn intent_checksummed(request: usize) -> u64 {
    (RECORDED + WRITE_HEAD + request.saturating_sub(ADDRESS_SIZE + REQUEST_SIZE)) as u64
}

/// The writes of a change.
#[derive(Default)]
pub(super) struct Change(Vec<u8>);

impl Change {
    /// Adds a write of the object at `at`.
    pub(super) fn object(
        &mut self,
        at: u64,
        header: Header,
        start: [u8; START],
        (offset, bytes): (usize, &[u8]),
    ) {
        let (offset, len) = (U32::new(offset as u32), U32::new(bytes.len() as u32));
        let head = WriteHead { at: at.into(), header, start, offset, len };
        self.0.extend_from_slice(head.as_bytes());
        self.0.extend_from_slice(bytes);
    }

    /// Adds a write of the 16 bytes at `at`.
    pub(super) fn word(&mut self, at: u64, word: [u8; START]) {
        self.object(at, Header::new_zeroed(), word, (0, &[]));
    }
}

/// The intents of a table.
#[derive(Clone, Copy)]
pub(super) struct Intents {
    /// The table.
    pub(super) extent: Extent,
    /// Length of an intent.
    pub(super) len: u64,
    /// Length of the content of an object.
    pub(super) content: usize,
}

impl Intents {
    /// Number of bytes of an intent with so many writes, with so many further bytes in all.
    pub(super) fn len_of(writes: usize, bytes: usize) -> u64 {
        ((RECORDED + writes * WRITE_HEAD + bytes) as u64).next_multiple_of(CACHE_LINE)
    }

    /// Returns the numbers of the last intent.
    pub(super) fn state<M: Memory>(&self, memory: &M) -> Result<State, M::Wait> {
        let [odd, even] = [self.recorded(memory, 1)?, self.recorded(memory, 0)?];
        Ok(if odd.state.number.get() > even.state.number.get() { odd.state } else { even.state })
    }

    /// Records a change, with these numbers after it, and carries it out.
    pub(super) fn carry_out<M: Memory>(
        &self,
        memory: &M,
        state: &mut State,
        change: &Change,
    ) -> Result<(), M::Wait> {
        state.number = raised(state.number);
        let mut recorded = Recorded {
            state: *state,
            len: (change.0.len() as u64).into(),
            crc: U64::ZERO,
            reserved: U64::ZERO,
        };
        let bytes = [recorded.as_bytes(), &change.0].concat();
        assert!(bytes.len() as u64 <= self.len, "a change fits into an intent");
        recorded.crc = crc(&bytes).into();
        let at = self.at(state.number.get());
        memory.write(at + RECORDED as u64, &change.0)?;
        memory.write(at, recorded.as_bytes())?;
        self.apply(memory, &change.0)
    }

    /// Carries out the last complete intent once more, and removes an incomplete one.
    pub(super) fn repair<M: Memory>(&self, memory: &M) -> Result<(), M::Wait> {
        let mut last: Option<(u64, Vec<u8>)> = None;
        for number in [1, 0] {
            let mut recorded = self.recorded(memory, number)?;
            let mut writes = vec![0; recorded.len.get().min(self.len - RECORDED as u64) as usize];
            memory.read(self.at(number) + RECORDED as u64, &mut writes)?;
            let sum = std::mem::replace(&mut recorded.crc, U64::ZERO);
            if sum.get() != crc(&[recorded.as_bytes(), &writes].concat()) || !self.holds(&writes) {
                memory.write(self.at(number), Recorded::new_zeroed().as_bytes())?;
                continue;
            }
            let number = recorded.state.number.get();
            if last.as_ref().is_none_or(|(of_last, _)| *of_last < number) {
                last = Some((number, writes));
            }
        }
        last.map_or(Ok(()), |(_, writes)| self.apply(memory, &writes))
    }

    fn at(&self, number: u64) -> u64 {
        self.extent.at + if number % 2 == 1 { 0 } else { self.len }
    }

    fn recorded<M: Memory>(&self, memory: &M, number: u64) -> Result<Recorded, M::Wait> {
        let mut recorded = Recorded::new_zeroed();
        memory.read(self.at(number), recorded.as_mut_bytes())?;
        Ok(recorded)
    }

    /// Whether all writes lie in the table. A client can have written an intent.
    fn holds(&self, writes: &[u8]) -> bool {
        Writes(writes).all(|(head, bytes)| {
            let is_object = head.header.version != U64::ZERO;
            let len = if is_object { object_len(self.content) } else { START as u64 };
            let is_inside = head.at.get().checked_sub(self.extent.at);
            let is_inside = is_inside
                .and_then(|offset| offset.checked_add(len))
                .is_some_and(|end| end <= self.extent.len);
            let end = head.offset.get() as usize + bytes.len();
            is_inside && head.at.get().is_multiple_of(START as u64) && (!is_object || end <= self.content)
        })
    }

    fn apply<M: Memory>(&self, memory: &M, writes: &[u8]) -> Result<(), M::Wait> {
        let (mut object, mut content) = (Vec::new(), Vec::new());
        for (head, bytes) in Writes(writes) {
            if head.header.version == U64::ZERO {
                memory.write(head.at.get(), &head.start)?;
                continue;
            }
            object.resize(LINES.image_len(self.content), 0);
            memory.read(head.at.get(), &mut object)?;
            // The write may be under way already. The bytes that it does not replace are the same in all versions.
            decode(&object, self.content, &mut content, false);
            content[..START].copy_from_slice(&head.start);
            content[head.offset.get() as usize..][..bytes.len()].copy_from_slice(bytes);
            LINES.encode(head.header.version.get(), &content, &mut object);
            memory.write(head.at.get() + HEADER_SIZE as u64, &object)?;
            memory.write(head.at.get(), head.header.as_bytes())?;
        }
        Ok(())
    }
}

/// Iterates over encoded writes. Ends at the first byte that is of no write.
struct Writes<'a>(&'a [u8]);

impl<'a> Iterator for Writes<'a> {
    type Item = (&'a WriteHead, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (head, rest) = WriteHead::ref_from_prefix(self.0).ok()?;
        let (bytes, rest) = rest.split_at_checked(head.len.get() as usize)?;
        self.0 = rest;
        Some((head, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stored_format_never_changes() {
        let header = Header { version: 0x1_0002.into(), tag: 7.into() };
        let mut image = Vec::new();
        LINES.encode(header.version.get(), b"0123456789abcdefghij", &mut image);
        let object = [header.as_bytes(), &image].concat();
        assert_eq!(
            object,
            b"\x02\0\x01\0\0\0\0\0\x07\0\0\0\0\0\0\0\x03\x000123456789abcd\x03\0efghij\0\0\0\0\0\0\0\0"
        );
        let mut content = Vec::new();
        assert_eq!(decode(&object, 20, &mut content, true), Some(header));
        assert_eq!(content, b"0123456789abcdefghij");
        let mut torn = object;
        torn[16] = 2;
        assert_eq!(decode(&torn, 20, &mut content, true), None);
        let mut change = Change::default();
        change.object(4096, header, *b"start of content", (18, b"xy"));
        assert_eq!(change.0[24..], *b"start of content\x12\0\0\0\x02\0\0\0xy");
    }
}

//! The bytes of a packet.
//!
//! ```text
//! packet | magic u8 | direction u8 | entries u8 | 0 u8 | coordinator u16 | task u16 | batch u64 | epoch u64 |
//!        | entry ... |
//! entry  | type u8 | index u8 | 0 u16 | size u32 | payload | filler, to whole words of 8 bytes |
//! ```
//!
//! All numbers are little-endian. The type of a response is its status. The index of an entry is its place in the
//! batch, and that of a response is that of its request.
//!
//! Differs from the paper (4.2): the header of an entry has 8 bytes in place of 4, since a payload may be longer than
//! 4 KiB. The batch has a number, which the paper's packets lack.

use farside_remote::fabric::CALL_BYTES_MAX;
use farside_remote::service::ADDRESS_SIZE;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Largest number of requests of a batch.
pub const ENTRIES_MAX: usize = 16;
/// Size of the longest packet in bytes.
pub const PACKET_MAX: usize = CALL_BYTES_MAX - ADDRESS_SIZE;

const MAGIC: u8 = 0xFA;
const REQUESTS: u8 = 0;
const RESPONSES: u8 = 1;
const WORD: usize = 8;
/// Size of the header of a packet in bytes.
pub(in crate::rpc) const HEADER_SIZE: usize = size_of::<HeaderBytes>();
/// Offset in a packet of the type of its first request.
pub const FIRST_TYPE: usize = HEADER_SIZE + std::mem::offset_of!(EntryHeader, kind);
/// Offset of the number of entries in a packet.
const ENTRIES_OFFSET: usize = 2;

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HeaderBytes {
    magic: u8,
    direction: u8,
    entries: u8,
    reserved: u8,
    coordinator: U16,
    task: U16,
    batch: U64,
    epoch: U64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct EntryHeader {
    kind: u8,
    index: u8,
    reserved: U16,
    size: U32,
}

/// Sender of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of the coordinator, a client of the store.
    pub coordinator: u16,
    /// Number of the coordinator's task.
    pub task: u16,
    /// Number of the batch. Those of a task ascend.
    pub batch: u64,
    /// Epoch of the coordinator.
    pub epoch: u64,
}

/// A request or a response in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry<'a> {
    /// Type of the request, or status of the response.
    pub(super) kind: u8,
    /// Place of the request in its batch.
    pub(super) index: u8,
    pub(super) payload: &'a [u8],
}

/// Size of an entry with a payload of `payload` bytes.
pub(in crate::rpc) const fn entry_size(payload: usize) -> usize {
    size_of::<EntryHeader>() + payload.next_multiple_of(WORD)
}

/// Appends a packet without entries to `out`.
pub(super) fn begin(header: &Header, is_response: bool, out: &mut Vec<u8>) {
    let bytes = HeaderBytes {
        magic: MAGIC,
        direction: if is_response { RESPONSES } else { REQUESTS },
        entries: 0,
        reserved: 0,
        coordinator: U16::new(header.coordinator),
        task: U16::new(header.task),
        batch: U64::new(header.batch),
        epoch: U64::new(header.epoch),
    };
    out.extend_from_slice(bytes.as_bytes());
}

/// Appends an entry, whose payload `write` appends, to the packet that begins at `from`. Returns the result of `write`.
/// The packet is as before if that is an error.
pub(super) fn append<E>(
    out: &mut Vec<u8>,
    from: usize,
    (kind, index): (u8, u8),
    write: impl FnOnce(&mut Vec<u8>) -> Result<Option<u8>, E>,
) -> Result<(), E> {
    let at = out.len();
    out.extend_from_slice(&[0; size_of::<EntryHeader>()]);
    let payload_at = out.len();
    let written = write(out).inspect_err(|_| out.truncate(at))?;
    let size = out.len() - payload_at;
    let header = EntryHeader {
        kind: written.unwrap_or(kind),
        index,
        reserved: U16::ZERO,
        size: U32::new(size as u32),
    };
    out[at..payload_at].copy_from_slice(header.as_bytes());
    out.resize(payload_at + size.next_multiple_of(WORD), 0);
    out[from + ENTRIES_OFFSET] += 1;
    Ok(())
}

/// Counts one entry less in the packet that begins at `from`. The caller has truncated the packet.
pub(super) fn forget_last(out: &mut [u8], from: usize) {
    out[from + ENTRIES_OFFSET] -= 1;
}

/// The entries of a packet, in their order.
#[derive(Clone, Debug)]
pub(super) struct Entries<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Entries<'a> {
    type Item = Entry<'a>;

    fn next(&mut self) -> Option<Entry<'a>> {
        self.left = self.left.checked_sub(1)?;
        let (entry, after) = EntryHeader::ref_from_prefix(self.rest).ok()?;
        let size = entry.size.get() as usize;
        let (filled, rest) = after.split_at_checked(size.checked_next_multiple_of(WORD)?)?;
        self.rest = rest;
        Some(Entry { kind: entry.kind, index: entry.index, payload: &filled[..size] })
    }
}

/// Decodes a packet. Returns `None` if the bytes are none, or if the packet has the other direction.
pub(super) fn decode(bytes: &[u8], is_response: bool) -> Option<(Header, Entries<'_>)> {
    let (header, rest) = HeaderBytes::ref_from_prefix(bytes).ok()?;
    let direction = if is_response { RESPONSES } else { REQUESTS };
    let count = usize::from(header.entries);
    if header.magic != MAGIC || header.direction != direction || count > ENTRIES_MAX {
        return None;
    }
    let entries = Entries { rest, left: count };
    let mut all = entries.clone();
    let is_whole = all.by_ref().count() == count && all.rest.is_empty();
    let header = Header {
        coordinator: header.coordinator.get(),
        task: header.task.get(),
        batch: header.batch.get(),
        epoch: header.epoch.get(),
    };
    is_whole.then_some((header, entries))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const HEADER: Header = Header { coordinator: 300, task: 70, batch: 1 << 40, epoch: 9 };

    fn packet(payloads: &[&[u8]], is_response: bool) -> Vec<u8> {
        let mut bytes = vec![7; 3];
        begin(&HEADER, is_response, &mut bytes);
        for (index, payload) in (0..).zip(payloads) {
            let write = |out: &mut Vec<u8>| {
                out.extend_from_slice(payload);
                Ok::<_, Infallible>((index == 1).then_some(99))
            };
            let Ok(()) = append(&mut bytes, 3, (index + 10, index), write);
        }
        bytes.split_off(3)
    }

    #[test]
    fn packets_survive_encoding_and_others_are_refused() {
        for is_response in [false, true] {
            let bytes = packet(&[b"", b"a", &[3; 8], &[4; 4000]], is_response);
            assert_eq!(bytes.len(), HEADER_SIZE + [0, 1, 8, 4000].map(entry_size).iter().sum::<usize>());
            let (header, entries) = decode(&bytes, is_response).expect("a packet");
            let entries: Vec<Entry<'_>> = entries.collect();
            assert_eq!(header, HEADER);
            let kinds: Vec<(u8, u8)> = entries.iter().map(|entry| (entry.kind, entry.index)).collect();
            assert_eq!(kinds, [(10, 0), (99, 1), (12, 2), (13, 3)]);
            assert_eq!((entries[1].payload, entries[3].payload), (&b"a"[..], &[4; 4000][..]));
            assert!(decode(&bytes, !is_response).is_none());
            for len in 0..bytes.len() {
                assert!(decode(&bytes[..len], is_response).is_none(), "{len} bytes");
            }
            for (at, byte) in [(0, 0), (2, 17), (2, 3), (HEADER_SIZE + 7, 255)] {
                let mut hostile = bytes.clone();
                hostile[at] = byte;
                assert!(decode(&hostile, is_response).is_none(), "byte {at} is {byte}");
            }
        }
    }

    #[test]
    fn an_entry_that_fails_leaves_no_bytes() {
        let mut bytes = Vec::new();
        begin(&HEADER, false, &mut bytes);
        let failed = append(&mut bytes, 0, (1, 0), |out| {
            out.push(5);
            Err::<Option<u8>, ()>(())
        });
        assert_eq!(failed, Err(()));
        let (header, entries) = decode(&bytes, false).expect("a packet");
        assert_eq!((header, entries.count()), (HEADER, 0));
    }
}

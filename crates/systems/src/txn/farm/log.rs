//! The bytes of the log of a FaRM store.
//!
//! ```text
//! word     | transaction u64 | stamp u62, state u2 | truncated u64 | 0 u64 |
//! record   | checksum u64 | transaction u64 | stamp u64 | writes u32 | bytes u32 | the writes |
//! write    | object u64 | expected version u64 | key length u16 | kind u8 | 0 u8 | value length u32 | key | value |
//! ```
//!
//! All numbers are little-endian.

use super::layout::Spec;
use super::object::{ABSENT, Content, VALUE};
use crate::lease::ClientId;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(super) const CLIENT_BITS: u32 = 14;
pub(super) const LANE_BITS: u32 = 6;
/// Size of a word in bytes.
pub(super) const WORD_SIZE: u64 = size_of::<Word>() as u64;
/// Size of the header of a write in bytes.
pub(super) const WRITE_SIZE: usize = size_of::<WriteHeader>();
/// Size of the header of a record in bytes.
pub(super) const RECORD_SIZE: usize = size_of::<RecordHeader>();
/// Expected version of an object that may have any.
pub(super) const ANY_VERSION: u64 = u64::MAX;

/// Number of a transaction: its count in its lane, the lane, and the client's id. No two transactions of a store have
/// the same number, and those of a lane ascend.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub(super) struct TxnId(U64);

impl TxnId {
    /// No transaction.
    pub(super) const NONE: TxnId = TxnId(U64::ZERO);

    /// Returns the transaction with this count in a lane; `None` if the count has more than 44 bits.
    pub(super) fn new(entry: EntryId, count: u64) -> Option<TxnId> {
        let low = u64::from(entry.lane) << CLIENT_BITS | u64::from(entry.client.number());
        (count >> (u64::BITS - CLIENT_BITS - LANE_BITS) == 0)
            .then(|| TxnId(U64::new(count << (CLIENT_BITS + LANE_BITS) | low)))
    }

    pub(super) fn of_bits(bits: u64) -> TxnId {
        TxnId(U64::new(bits))
    }

    pub(super) fn bits(self) -> u64 {
        self.0.get()
    }

    /// Number of the transaction in its lane.
    pub(super) fn count(self) -> u64 {
        self.0.get() >> (CLIENT_BITS + LANE_BITS)
    }

    /// The log entry of the transaction; `None` if it is no transaction.
    pub(super) fn entry(self) -> Option<EntryId> {
        let client = ClientId::new((self.0.get() & ((1 << CLIENT_BITS) - 1)) as u16)?;
        let lane = (self.0.get() >> CLIENT_BITS & ((1 << LANE_BITS) - 1)) as u16;
        Some(EntryId { client, lane })
    }

    /// The client of the transaction; `None` if it is no transaction.
    pub(super) fn client(self) -> Option<ClientId> {
        self.entry().map(|entry| entry.client)
    }
}

/// A log entry: a lane of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId {
    pub(super) client: ClientId,
    pub(super) lane: u16,
}

/// State of the last transaction of a lane at a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// It has no locks and changes nothing: it was aborted, or there is none.
    Aborted = 0,
    /// It may have locks, and its record is complete.
    Locked = 1,
    /// It is committed, and its values are being installed.
    Decided = 2,
    /// It is committed, and has no locks.
    Done = 3,
}

/// Word of a log entry at a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) txn: TxnId,
    pub(super) stamp: u64,
    pub(super) state: State,
    /// The records of the lane's transactions up to this one were applied to the copies here.
    pub(super) truncated: TxnId,
}

/// Bytes of a [`Word`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct WordBytes {
    txn: TxnId,
    stamp_and_state: U64,
    truncated: TxnId,
    reserved: U64,
}

/// Number of bytes of a word that hold the transaction, its stamp and its state. They are written at once.
pub(super) const WORD_HALF: usize = 16;
/// Offset of the number of the last truncated transaction in a word.
pub(super) const TRUNCATED_OFFSET: u64 = 16;

impl Word {
    pub(super) fn of(bytes: &WordBytes) -> Word {
        let number = bytes.stamp_and_state.get();
        let state = match number & 3 {
            0 => State::Aborted,
            1 => State::Locked,
            2 => State::Decided,
            _ => State::Done,
        };
        Word { txn: bytes.txn, stamp: number >> 2, state, truncated: bytes.truncated }
    }

    /// The half of the word with the transaction and its state.
    pub(super) fn half(txn: TxnId, stamp: u64, state: State) -> [u8; WORD_HALF] {
        let number = U64::new(stamp << 2 | state as u64);
        let mut half = [0; WORD_HALF];
        half[..8].copy_from_slice(txn.as_bytes());
        half[8..].copy_from_slice(number.as_bytes());
        half
    }

    /// Whether the transaction may have locks, or is yet to be completed.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, State::Locked | State::Decided)
    }
}

/// Header of a write.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WriteHeader {
    object: U64,
    expected: U64,
    key_len: U16,
    kind: u8,
    reserved: u8,
    value_len: U32,
}

/// A write of a transaction to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write<'a> {
    /// Number of the object at its primary.
    pub(super) object: u64,
    /// Version that the transaction has read; [`ANY_VERSION`] if it has not read the object.
    pub(super) expected: u64,
    pub(super) key: &'a [u8],
    /// The new value; `None` if the key is deleted.
    pub(super) value: Option<&'a [u8]>,
}

impl<'a> Write<'a> {
    /// Number of bytes that a write takes.
    pub(super) fn len(key: &[u8], value: Option<&[u8]>) -> usize {
        WRITE_SIZE + key.len() + value.map_or(0, <[u8]>::len)
    }

    /// Appends the write to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let value = self.value.unwrap_or_default();
        let header = WriteHeader {
            object: U64::new(self.object),
            expected: U64::new(self.expected),
            key_len: U16::new(self.key.len() as u16),
            kind: if self.value.is_some() { VALUE } else { ABSENT },
            reserved: 0,
            value_len: U32::new(value.len() as u32),
        };
        [header.as_bytes(), self.key, value].into_iter().for_each(|part| out.extend_from_slice(part));
    }

    /// Decodes writes; `None` if they are not those of a client of this store.
    pub(super) fn decode_all(mut bytes: &'a [u8], spec: &Spec) -> Option<Vec<Write<'a>>> {
        let mut writes = Vec::new();
        while !bytes.is_empty() {
            let (header, rest) = WriteHeader::ref_from_prefix(bytes).ok()?;
            let (key, rest) = rest.split_at_checked(header.key_len.get().into())?;
            let (value, rest) = rest.split_at_checked(header.value_len.get() as usize)?;
            let is_sound = header.object.get() < spec.objects
                && !key.is_empty()
                && key.len() + value.len() <= spec.pair_max as usize;
            let value = match header.kind {
                VALUE if is_sound => Some(value),
                ABSENT if is_sound && value.is_empty() => None,
                _ => return None,
            };
            let (object, expected) = (header.object.get(), header.expected.get());
            writes.push(Write { object, expected, key, value });
            bytes = rest;
        }
        Some(writes)
    }

    /// The content that the write gives to its object.
    pub(super) fn content(&self, stamp: u64) -> Content<'a> {
        Content { stamp, key: self.key, value: self.value }
    }
}

/// Header of a record.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RecordHeader {
    checksum: U64,
    pub(super) txn: TxnId,
    pub(super) stamp: U64,
    reserved: U32,
    len: U32,
}

impl RecordHeader {
    /// Header of the record of a transaction with these writes.
    pub(super) fn new(txn: TxnId, stamp: u64, writes: &[u8]) -> RecordHeader {
        let header = RecordHeader { stamp: U64::new(stamp), ..RecordHeader::unchecked(txn, writes) };
        RecordHeader { checksum: U64::new(header.checksum_with(writes)), ..header }
    }

    /// Header of a record without a stamp and a checksum. Only its member reads it, and it knows that it is whole.
    pub(super) fn unchecked(txn: TxnId, writes: &[u8]) -> RecordHeader {
        RecordHeader {
            checksum: U64::ZERO,
            txn,
            stamp: U64::ZERO,
            reserved: U32::ZERO,
            len: U32::new(writes.len() as u32),
        }
    }

    fn checksum_with(&self, writes: &[u8]) -> u64 {
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        digest.update(&self.as_bytes()[size_of::<U64>()..]);
        digest.update(writes);
        digest.finalize()
    }

    /// Length of the writes in bytes. Untrusted.
    pub(super) fn len(&self) -> usize {
        self.len.get() as usize
    }

    /// Whether the record is whole.
    pub(super) fn is_sound(&self, writes: &[u8]) -> bool {
        self.txn != TxnId::NONE && self.checksum.get() == self.checksum_with(writes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{IDS_MAX, LANES_MAX};
    use super::*;

    #[test]
    fn writes_survive_encoding_and_damaged_ones_are_refused() {
        let spec = Spec::example(16);
        let writes = [
            Write { object: 3, expected: 9, key: b"ada", value: Some(b"1") },
            Write { object: 19, expected: ANY_VERSION, key: b"bob", value: None },
        ];
        let mut bytes = Vec::new();
        writes.iter().for_each(|write| write.encode(&mut bytes));
        assert_eq!(Write::decode_all(&bytes, &spec), Some(writes.to_vec()));
        assert_eq!(bytes.len(), writes.iter().map(|write| Write::len(write.key, write.value)).sum::<usize>());
        assert_eq!(Write::decode_all(&bytes[..bytes.len() - 1], &spec), None);
        let record = RecordHeader::new(TxnId::of_bits(4097), 3, &bytes);
        assert!(record.is_sound(&bytes));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x80;
            assert!(!record.is_sound(&damaged));
            let _must_not_panic = Write::decode_all(&damaged, &spec);
        }
        bytes[0] = 20;
        assert_eq!(Write::decode_all(&bytes, &spec), None, "the store has 20 objects");
    }

    #[test]
    fn transactions_of_a_lane_ascend_and_name_their_entry() {
        let entry = EntryId { client: ClientId::new(IDS_MAX).expect("an id"), lane: LANES_MAX - 1 };
        let ids = [1, 2, 1 << 43].map(|count| TxnId::new(entry, count).expect("a small count"));
        assert!(ids.is_sorted());
        assert!(ids.iter().all(|txn| txn.entry() == Some(entry)));
        assert_eq!((ids[1].count(), TxnId::new(entry, 1 << 44), TxnId::NONE.entry()), (2, None, None));
    }
}

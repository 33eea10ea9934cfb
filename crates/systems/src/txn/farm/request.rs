//! Calls to the service of a FaRM store, and their answers.
//!
//! ```text
//! request | op u8 | 0, 7 bytes | transaction u64 | number u64 | the rest |            after the store's secret
//! claim   | key |                                                   answer: number of the key's object
//! lock    | writes |               number: transaction to truncate  answer: highest stamp of the objects
//! validate | object u64, version u64, x objects |
//! commit  | |                      number: stamp
//! replicate | record |              number: the backup's part
//! abort, truncate, look | |        the transaction of a look only names its lane
//! answer  | outcome u8 | 0, 7 bytes | number u64 | the rest |
//! look    | transaction u64 | stamp u62, state u2 | truncated u64 | transaction u64, stamp u64, x backups |
//! ```

use super::log::{EntryId, TxnId, Word, WordBytes};
use crate::txn::KEY_MAX;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Header of a request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RequestHeader {
    op: u8,
    reserved: [u8; 7],
    txn: TxnId,
    number: U64,
}

/// A version of an object that a transaction has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Check {
    pub(super) object: U64,
    pub(super) version: U64,
}

/// A decoded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    /// Gives a key an object, unless it has one.
    Claim {
        /// The key.
        key: &'a [u8],
    },
    /// Locks the objects that a transaction writes, all or none.
    Lock {
        /// The transaction.
        txn: TxnId,
        /// A former transaction of the lane whose records may be truncated, or none.
        truncate: TxnId,
        /// The writes.
        writes: &'a [u8],
    },
    /// Frees the locks of a transaction that is not committed, and refuses to lock for it from now on.
    Abort {
        /// The transaction.
        txn: TxnId,
    },
    /// Checks that objects have these versions and no locks.
    Validate {
        /// The versions.
        checks: &'a [Check],
    },
    /// Installs the writes of a committed transaction, and frees its locks.
    Commit {
        /// The transaction.
        txn: TxnId,
        /// Stamp of the transaction.
        stamp: u64,
    },
    /// Writes the record of a committed transaction at a backup that lacks it.
    Replicate {
        /// The transaction.
        txn: TxnId,
        /// Number of the backup's part.
        part: u64,
        /// The record.
        record: &'a [u8],
    },
    /// Applies the records of a lane up to that of a committed transaction to the copies.
    Truncate {
        /// The transaction.
        txn: TxnId,
    },
    /// Returns the state of a lane.
    Look {
        /// The lane.
        entry: EntryId,
    },
}

const CLAIM: u8 = 1;
const LOCK: u8 = 2;
const ABORT: u8 = 3;
const VALIDATE: u8 = 4;
const COMMIT: u8 = 5;
const TRUNCATE: u8 = 6;
const LOOK: u8 = 7;
const REPLICATE: u8 = 8;

impl<'a> Request<'a> {
    /// Appends the encoded request to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let (op, txn, number, rest) = match *self {
            Request::Claim { key } => (CLAIM, TxnId::NONE, 0, key),
            Request::Lock { txn, truncate, writes } => (LOCK, txn, truncate.bits(), writes),
            Request::Abort { txn } => (ABORT, txn, 0, &[][..]),
            Request::Validate { checks } => (VALIDATE, TxnId::NONE, 0, checks.as_bytes()),
            Request::Commit { txn, stamp } => (COMMIT, txn, stamp, &[][..]),
            Request::Truncate { txn } => (TRUNCATE, txn, 0, &[][..]),
            Request::Replicate { txn, part, record } => (REPLICATE, txn, part, record),
            Request::Look { entry } => (LOOK, TxnId::new(entry, 0).unwrap_or_default(), 0, &[][..]),
        };
        let header = RequestHeader { op, reserved: [0; 7], txn, number: U64::new(number) };
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(rest);
    }

    /// Decodes a request that a peer sent.
    ///
    /// # Errors
    /// This release does not support the request.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Request<'a>, String> {
        let wrong =
            |what: &str| Err(format!("the request to the store {what}: use the same release on both sides"));
        let Ok((header, rest)) = RequestHeader::ref_from_prefix(bytes) else {
            return wrong("is shorter than its header");
        };
        let (txn, number) = (header.txn, header.number.get());
        let request = match header.op {
            CLAIM if (1..=KEY_MAX).contains(&rest.len()) => Request::Claim { key: rest },
            LOCK => Request::Lock { txn, truncate: TxnId::of_bits(number), writes: rest },
            VALIDATE => match <[Check]>::ref_from_bytes(rest) {
                Ok(checks) => Request::Validate { checks },
                Err(_) => return wrong("has an incomplete list of versions"),
            },
            ABORT if rest.is_empty() => Request::Abort { txn },
            COMMIT if rest.is_empty() && number >> 62 == 0 => Request::Commit { txn, stamp: number },
            REPLICATE => Request::Replicate { txn, part: number, record: rest },
            TRUNCATE if rest.is_empty() => Request::Truncate { txn },
            LOOK if rest.is_empty() => match txn.entry() {
                Some(entry) => Request::Look { entry },
                None => return wrong("names no lane"),
            },
            _ => return wrong("has an unknown operation or unexpected bytes"),
        };
        Ok(request)
    }

    /// The log entry that the request uses, if any.
    pub(super) fn entry(&self) -> Option<EntryId> {
        match *self {
            Request::Claim { .. } | Request::Validate { .. } => None,
            Request::Lock { txn, .. }
            | Request::Abort { txn }
            | Request::Commit { txn, .. }
            | Request::Replicate { txn, .. }
            | Request::Truncate { txn } => txn.entry(),
            Request::Look { entry } => Some(entry),
        }
    }

    /// Whether the request may change the store.
    pub(super) fn changes(&self) -> bool {
        !matches!(self, Request::Validate { .. } | Request::Look { .. })
    }
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Outcome {
    /// The service has carried out the request, now or before.
    Done = 0,
    /// An object has another version, or is locked by the transaction that the answer names. No lock was taken.
    Conflict = 1,
    /// The lane has another transaction, or this one has ended. Nothing was changed.
    Stale = 2,
    /// All objects or all slots of the key belong to other keys. Nothing was changed.
    TableFull = 3,
}

/// An answer of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer<'a> {
    pub(super) outcome: Outcome,
    pub(super) number: u64,
    pub(super) rest: &'a [u8],
}

impl<'a> Answer<'a> {
    pub(super) fn of(outcome: Outcome, number: u64) -> Answer<'a> {
        Answer { outcome, number, rest: &[] }
    }

    /// Appends the encoded answer to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&u64::from(self.outcome as u8).to_le_bytes());
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(self.rest);
    }

    /// Decodes an answer; `None` if this release does not understand it.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Answer<'a>> {
        let (outcome, rest) = bytes.split_first_chunk::<8>()?;
        let (number, rest) = rest.split_first_chunk::<8>()?;
        let outcome = match u64::from_le_bytes(*outcome) {
            0 => Outcome::Done,
            1 => Outcome::Conflict,
            2 => Outcome::Stale,
            3 => Outcome::TableFull,
            _ => return None,
        };
        Some(Answer { outcome, number: u64::from_le_bytes(*number), rest })
    }
}

/// State of a lane at a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LaneState {
    pub(super) word: Word,
    /// Transactions whose whole records lie in the log and are not truncated, with their stamps.
    pub(super) records: Vec<(TxnId, u64)>,
}

impl LaneState {
    /// Encodes the state into `out`, which it clears.
    pub(super) fn encode(word: &WordBytes, records: &[(TxnId, u64)], out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(word.as_bytes());
        for (txn, stamp) in records {
            out.extend_from_slice(txn.as_bytes());
            out.extend_from_slice(&stamp.to_le_bytes());
        }
    }

    /// Decodes a state; `None` if the bytes are none.
    pub(super) fn decode(bytes: &[u8]) -> Option<LaneState> {
        let (word, records) = WordBytes::ref_from_prefix(bytes).ok()?;
        let records = <[[U64; 2]]>::ref_from_bytes(records).ok()?;
        let records = records.iter().map(|[txn, stamp]| (TxnId::of_bits(txn.get()), stamp.get())).collect();
        Some(LaneState { word: Word::of(word), records })
    }

    /// The highest transaction of the lane that the member has seen.
    pub(super) fn last(&self) -> TxnId {
        let records = self.records.iter().map(|(txn, _)| *txn);
        records.chain([self.word.txn, self.word.truncated]).max().unwrap_or_default()
    }

    /// Whether a transaction is yet to be settled here.
    pub(super) fn is_open(&self) -> bool {
        self.word.is_open() || !self.records.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::ClientId;

    #[test]
    fn requests_survive_encoding_and_others_are_refused() {
        let entry = EntryId { client: ClientId::new(3).expect("an id"), lane: 2 };
        let txn = TxnId::new(entry, 9).expect("a small count");
        let checks = [Check { object: U64::new(5), version: U64::new(6) }];
        let requests = [
            Request::Claim { key: b"key" },
            Request::Lock { txn, truncate: TxnId::of_bits(1 << 40), writes: &[1; 30] },
            Request::Abort { txn },
            Request::Validate { checks: &checks },
            Request::Commit { txn, stamp: 77 },
            Request::Replicate { txn, part: 2, record: &[3; 40] },
            Request::Truncate { txn },
            Request::Look { entry },
        ];
        for request in requests {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            assert_eq!(Request::decode(&bytes), Ok(request));
            assert!(Request::decode(&bytes[..size_of::<RequestHeader>() - 1]).is_err());
            bytes[0] = 9;
            assert!(Request::decode(&bytes).is_err());
        }
        assert_eq!(requests[1].entry(), Some(entry));
    }
}

//! The requests of FaSST's transactions, one for each bucket, and their responses.
//!
//! ```text
//! get      | transaction u64 | bucket u64 | key |                      version u64, stamp u64, value
//! lock     | transaction u64 | bucket u64 | expected u64 | taken u64 | place u64 x taken | (length u16, key) x keys |
//!                                                                      highest stamp u64, place u64 x keys
//! lock+get | as lock: the last key is read |                           version u64, stamp u64, place u64, value
//! validate | transaction u64 | bucket u64 | version u64 |
//! log      | record |
//! backup   | transaction u64 | stamp u64 | bucket u64 | part u64 | write ... |
//! commit   | transaction u64 | stamp u64 | bucket u64 | 1 if it is the last one at this member u64 | write ... |
//! abort    | transaction u64 |
//! close    | transaction u64 |
//! grant    | nonce u64 |                                               epoch u64
//! fence    | nonce u64 |                                               epoch u64
//! raise    | |
//! look     | lane u64 |                                                the lane's word, transaction with a record u64
//! record   | lane u64 |                                                record
//! promote  | |                                                         epoch u64 of another promoter, if it is later
//! fill     | stamp u64 | bucket u64 | part u64 | write |
//! ```
//!
//! The transaction of a `get` is that of the client, or 0 if it has no locks: it reads buckets that it has locked
//! itself. The taken places of a `lock` are those that the transaction was given in the bucket before. The keys before
//! the last one of a `lock+get` are those of other requests of the same batch, which come first. So each new key gets a
//! place of its own. In the response to a `lock+get`, the place is 2^64 - 1 if the key has none and its bucket's chain
//! has no free one: a `lock` adds an extra bucket, for a key that is written.
//!
//! Promoters have epochs above those of all clients. `raise` with one of them forgets all epochs of the client.
//!
//! The statuses of all responses are those of `Status`. A response that says who has a lock has the transaction.

use super::layout::{Place, TxnId, Word};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// Type of the request that reads a key.
pub const GET: u8 = 1;
/// Type of the request that locks a bucket.
pub const LOCK: u8 = 2;
/// Type of the request that compares a bucket's version.
pub const VALIDATE: u8 = 3;
/// Type of the request that stores a transaction's record.
pub const LOG: u8 = 4;
/// Type of the request that writes a copy of a bucket.
pub const BACKUP: u8 = 5;
/// Type of the request that writes a bucket and frees its lock.
pub const COMMIT: u8 = 6;
pub(super) const ABORT: u8 = 7;
/// Type of the request that says that a record is not needed any more.
pub const CLOSE: u8 = 8;
/// Type of a client's request for an epoch of its id.
pub const GRANT: u8 = 9;
/// Type of the request to admit only packets with this epoch of the client.
pub const RAISE: u8 = 10;
/// Type of the request that returns the state of a lane.
pub const LOOK: u8 = 11;
/// Type of the request that returns the record of a lane.
pub const RECORD: u8 = 12;
/// Type of the request that writes what a newcomer is to have.
pub const FILL: u8 = 13;
/// Type of the request that locks a bucket and reads a key.
pub const LOCK_GET: u8 = 14;
/// Type of a recoverer's request for an epoch of a client's id. The client gets none after it.
pub const FENCE: u8 = 15;
/// Type of the request to admit only packets of this promoter, and fills.
pub const PROMOTE: u8 = 16;

/// Epoch of the promoters' fills. Higher ones are those of promoters. Only promoters have keys while they send packets.
pub(super) const PROMOTION: u64 = 1 << 63;

/// Status of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    /// The request was carried out, now or before.
    Done = 0,
    /// The key has no value. The response has its version and its stamp, or nothing was changed.
    Absent = 1,
    /// The bucket is locked by the transaction in the response. Nothing was changed.
    Locked = 2,
    /// The bucket has another version. Nothing was changed.
    Changed = 3,
    /// There is no room for a new key. Nothing was changed.
    Full = 4,
    /// The transaction has ended here. Nothing was changed.
    Ended = 5,
}

impl Status {
    /// Returns the status with this number, if there is one.
    pub(super) fn of(number: u8) -> Option<Status> {
        Some(match number {
            0 => Status::Done,
            1 => Status::Absent,
            2 => Status::Locked,
            3 => Status::Changed,
            4 => Status::Full,
            5 => Status::Ended,
            _ => return None,
        })
    }
}

/// Appends words to a payload.
pub(super) fn put_words(out: &mut Vec<u8>, words: &[u64]) {
    words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

/// Splits words from the beginning of a payload; `None` if it is too short.
pub(super) fn words<const N: usize>(payload: &[u8]) -> Option<([u64; N], &[u8])> {
    let (words, rest) = <[U64; N]>::ref_from_prefix(payload).ok()?;
    Some((words.map(U64::get), rest))
}

/// In the response to a lock request that reads: the key has no place, and its bucket has no free one.
pub(super) const NO_PLACE: u64 = u64::MAX;

/// Appends places that the transaction of a lock request was given before.
pub(super) fn put_places(out: &mut Vec<u8>, places: impl ExactSizeIterator<Item = Place>) {
    put_words(out, &[places.len() as u64]);
    places.for_each(|place| put_words(out, &[place.bits()]));
}

/// Splits places from the beginning of the rest of a lock request; `None` if it is too short.
pub(super) fn places(bytes: &[u8]) -> Option<(Vec<Place>, &[u8])> {
    let ([count], rest) = words(bytes)?;
    let len = usize::try_from(count).ok()?.checked_mul(size_of::<U64>())?;
    let (places, rest) = rest.split_at_checked(len)?;
    let places = <[U64]>::ref_from_bytes(places).ok()?;
    Some((places.iter().map(|place| Place::of_bits(place.get())).collect(), rest))
}

/// Appends a key of a lock request.
pub(super) fn put_key(out: &mut Vec<u8>, key: &[u8]) {
    out.extend_from_slice(&(key.len() as u16).to_le_bytes());
    out.extend_from_slice(key);
}

/// Decodes the keys of a lock request; `None` if there are none, or if one is empty.
pub(super) fn keys(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut keys = Vec::new();
    while !bytes.is_empty() {
        let (len, rest) = bytes.split_first_chunk::<2>()?;
        let (key, rest) = rest.split_at_checked(u16::from_le_bytes(*len).into())?;
        if key.is_empty() {
            return None;
        }
        keys.push(key);
        bytes = rest;
    }
    (!keys.is_empty()).then_some(keys)
}

/// State of a lane at a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LaneState {
    pub(super) word: Word,
    /// Transaction whose whole record lies in the log; none if it is not needed any more.
    pub(super) record: TxnId,
}

impl LaneState {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.word.as_bytes());
        out.extend_from_slice(self.record.as_bytes());
    }

    /// Decodes a state; `None` if the bytes are none.
    pub(super) fn decode(bytes: &[u8]) -> Option<LaneState> {
        let (word, record) = Word::read_from_prefix(bytes).ok()?;
        Some(LaneState { word, record: TxnId::read_from_bytes(record).ok()? })
    }

    /// The highest transaction of the lane that the member has seen.
    pub(super) fn last(&self) -> TxnId {
        let Word { holder, ended, closed, .. } = self.word;
        holder.max(ended).max(closed).max(self.record)
    }

    /// Whether a transaction is yet to be settled here.
    pub(super) fn is_open(&self) -> bool {
        self.word.has_locks() || self.record != TxnId::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_survive_encoding_and_others_are_refused() {
        let mut bytes = Vec::new();
        put_words(&mut bytes, &[3, u64::MAX]);
        for key in [&b"a"[..], &[7; 1024]] {
            put_key(&mut bytes, key);
        }
        let ([three, max], rest) = words(&bytes).expect("two words");
        assert_eq!((three, max), (3, u64::MAX));
        assert_eq!(keys(rest), Some(vec![&b"a"[..], &[7; 1024]]));
        assert_eq!(keys(&rest[..rest.len() - 1]), None);
        assert_eq!(keys(&[]), None);
        assert_eq!(keys(&[0, 0]), None, "an empty key");
        assert_eq!(words::<2>(&bytes[..15]), None);

        let (mut bytes, taken) = (Vec::new(), [1, 2].map(|bucket| Place { bucket, slot: 6 }));
        put_places(&mut bytes, taken.into_iter());
        put_key(&mut bytes, b"a");
        let (found, rest) = places(&bytes).expect("two places");
        assert_eq!((&found[..], keys(rest)), (&taken[..], Some(vec![&b"a"[..]])));
        assert_eq!(places(&bytes[..23]), None);
        assert_eq!(places(&[0xff; 24]), None, "a count that overflows");

        let mut bytes = Vec::new();
        let state = LaneState { record: TxnId::of_bits(8), ..LaneState::default() };
        state.encode(&mut bytes);
        assert_eq!(LaneState::decode(&bytes), Some(state));
        assert_eq!(LaneState::decode(&bytes[1..]), None);
        assert!(state.is_open() && state.last() == TxnId::of_bits(8));
        for number in 0..=u8::MAX {
            assert!(Status::of(number).is_none_or(|status| status as u8 == number));
        }
    }
}

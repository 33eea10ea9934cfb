//! Requests to a Chequer store's service, and its answers.
//!
//! ```text
//! request  | op u8 | 0 u8 | key length u16 | value length u32 | first u64 | second u64 | key | bytes |
//! answer   | outcome u8 | 0 x 7 | stamp u64 | first u64 | second u64 | value |
//! ```
//!
//! All numbers are little-endian. A request follows the store's secret. The length of a value is that of a RESERVE; it
//! is 0 in all other requests.

use super::layout::{PARTITIONS_MAX, Stamp, VALUE_MAX};
use crate::kv::KEY_MAX;
use farside_remote::fabric::CALL_BYTES_MAX;
use farside_remote::service::ADDRESS_SIZE;

/// Number of bytes of a request before its key.
pub const REQUEST_SIZE: usize = 24;
/// Number of bytes of an answer before its value.
pub const ANSWER_SIZE: usize = 32;
/// Largest number of bytes of a value that one call carries, in either direction, beside the longest key.
pub const PART_MAX: usize = 48 << 10;
const _: () = assert!(ADDRESS_SIZE + REQUEST_SIZE + KEY_MAX + PART_MAX <= CALL_BYTES_MAX);
const _: () = assert!(ANSWER_SIZE + PART_MAX <= CALL_BYTES_MAX);

/// A decoded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Reads a part of the value of a key.
    Get {
        /// The key.
        key: &'a [u8],
        /// Offset in the value of the first byte to return.
        offset: u32,
        /// Stamp that the value must have; any if 0.
        stamp: Stamp,
    },
    /// Whether a key has a value. The answer is that of a get without the value.
    Contains {
        /// The key.
        key: &'a [u8],
    },
    /// Stores a value of at most [`PART_MAX`] bytes (mode 1).
    Put {
        /// The key.
        key: &'a [u8],
        /// The value.
        value: &'a [u8],
    },
    /// Deletes a key.
    Delete {
        /// The key.
        key: &'a [u8],
    },
    /// Reserves a block for a value (mode 2).
    Reserve {
        /// The key.
        key: &'a [u8],
        /// Number of the reservation, which the client chooses: its session never had a reservation of this number.
        /// Its low bits are the index of the key's partition ([`number_in`]).
        number: u64,
        /// Length of the value in bytes.
        len: u32,
        /// CRC of the block that the client will write.
        crc: u64,
    },
    /// Writes bytes to a reserved block, for a client that writes no memory itself.
    Write {
        /// Number of the reservation.
        number: u64,
        /// Offset of the bytes in the block.
        offset: u32,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Stores the value that was written to a reserved block.
    Commit {
        /// Number of the reservation.
        number: u64,
    },
    /// Gives a reserved block back. No WRITE to it may be on its way.
    Withdraw {
        /// Number of the reservation.
        number: u64,
    },
    /// Reads the first part of the value of a key. If the value has further parts, the service keeps its block for
    /// them, although the value may be replaced. It does not keep too many blocks, nor for long.
    Hold {
        /// The key.
        key: &'a [u8],
    },
    /// Ends a [`Request::Hold`].
    Release {
        /// The key.
        key: &'a [u8],
        /// Stamp of the value that was held.
        stamp: Stamp,
    },
}

const GET: u8 = 1;
const CONTAINS: u8 = 2;
const PUT: u8 = 3;
const DELETE: u8 = 4;
const RESERVE: u8 = 5;
const WRITE: u8 = 6;
const COMMIT: u8 = 7;
const WITHDRAW: u8 = 8;
const HOLD: u8 = 9;
const RELEASE: u8 = 10;

/// Number of the low bits of a reservation's number that are the index of its partition.
pub(super) const PARTITION_BITS: u32 = 6;
const _: () = assert!(PARTITIONS_MAX <= 1 << PARTITION_BITS);

/// Returns the number of a reservation in a partition. `unique` differs from that of all other reservations of the
/// client's session.
pub fn number_in(partition: u64, unique: u64) -> u64 {
    unique << PARTITION_BITS | partition
}

impl<'a> Request<'a> {
    /// Whether the request may change the store.
    pub fn changes(&self) -> bool {
        !matches!(
            self,
            Request::Get { .. } | Request::Contains { .. } | Request::Hold { .. } | Request::Release { .. }
        )
    }

    /// Appends the encoded request to `bytes`.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let none: &[u8] = &[];
        let mut value_len = 0;
        let (op, first, second, key, payload) = match *self {
            Request::Get { key, offset, stamp } => (GET, offset.into(), stamp.0, key, none),
            Request::Contains { key } => (CONTAINS, 0, 0, key, none),
            Request::Put { key, value } => (PUT, 0, 0, key, value),
            Request::Delete { key } => (DELETE, 0, 0, key, none),
            Request::Reserve { key, number, len, crc } => {
                value_len = len;
                (RESERVE, number, crc, key, none)
            }
            Request::Write { number, offset, bytes } => (WRITE, number, offset.into(), none, bytes),
            Request::Commit { number } => (COMMIT, number, 0, none, none),
            Request::Withdraw { number } => (WITHDRAW, number, 0, none, none),
            Request::Hold { key } => (HOLD, 0, 0, key, none),
            Request::Release { key, stamp } => (RELEASE, 0, stamp.0, key, none),
        };
        let [low, high] = (key.len() as u16).to_le_bytes();
        bytes.extend_from_slice(&[op, 0, low, high]);
        bytes.extend_from_slice(&value_len.to_le_bytes());
        [first, second].iter().for_each(|number: &u64| bytes.extend_from_slice(&number.to_le_bytes()));
        bytes.extend_from_slice(key);
        bytes.extend_from_slice(payload);
    }

    /// Decodes a request that a peer sent.
    ///
    /// # Errors
    /// This release does not support the request.
    pub fn decode(bytes: &'a [u8]) -> Result<Request<'a>, String> {
        let wrong =
            |what: &str| Err(format!("the request to the store {what}: use the same release on both sides"));
        let Some((header, rest)) = bytes.split_first_chunk::<REQUEST_SIZE>() else {
            return wrong("is shorter than its header");
        };
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let (op, first, second) = (header[0], number(8), number(16));
        let value_len = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        let Some((key, payload)) = rest.split_at_checked(u16::from_le_bytes([header[2], header[3]]).into())
        else {
            return wrong("is shorter than its key");
        };
        if header[1] != 0 || value_len != 0 && op != RESERVE {
            return wrong("has unexpected bytes");
        }
        let has_key = matches!(op, GET | CONTAINS | PUT | DELETE | RESERVE | HOLD | RELEASE);
        if has_key != (1..=KEY_MAX).contains(&key.len()) {
            return wrong("has a key of an invalid length");
        }
        if payload.len() > PART_MAX || !(payload.is_empty() || matches!(op, PUT | WRITE)) {
            return wrong("has a value of an invalid length");
        }
        let small = |number: u64| u32::try_from(number).ok().filter(|&number| number as usize <= VALUE_MAX);
        let request = match (op, small(first), small(second)) {
            (GET, Some(offset), _) => Request::Get { key, offset, stamp: Stamp(second) },
            (CONTAINS, Some(0), Some(0)) => Request::Contains { key },
            (PUT, Some(0), Some(0)) => Request::Put { key, value: payload },
            (DELETE, Some(0), Some(0)) => Request::Delete { key },
            (RESERVE, ..) if value_len as usize <= VALUE_MAX => {
                Request::Reserve { key, number: first, len: value_len, crc: second }
            }
            (WRITE, _, Some(offset)) => Request::Write { number: first, offset, bytes: payload },
            (COMMIT, _, Some(0)) => Request::Commit { number: first },
            (WITHDRAW, _, Some(0)) => Request::Withdraw { number: first },
            (HOLD, Some(0), Some(0)) => Request::Hold { key },
            (RELEASE, Some(0), _) => Request::Release { key, stamp: Stamp(second) },
            (GET..=RELEASE, _, _) => return wrong("has an invalid number"),
            _ => return wrong("has an unknown operation"),
        };
        Ok(request)
    }
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// The operation was carried out. The key has a value, or had one before a delete.
    Done = 0,
    /// The key has no value. Nothing was changed.
    Absent = 1,
    /// The area of values has no block of this size. Nothing was changed.
    OutOfMemory = 2,
    /// All buckets on the key's path belong to other keys. Nothing was changed.
    TableFull = 3,
    /// The key may be in a damaged record. Nothing was changed.
    Damaged = 4,
    /// The session has no reservation of this number, or cannot get one. Nothing was changed.
    NotReserved = 5,
    /// The bytes of the block are not those whose CRC the reservation has. Nothing was changed.
    NotWritten = 6,
    /// The value has another stamp by now.
    Changed = 7,
    /// The session has as many reservations as a session may have. Nothing was changed.
    TooManyReservations = 8,
}

/// Answer of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    /// Outcome of the request.
    pub outcome: Outcome,
    /// Stamp of the value that a get returns, or of the put or delete.
    pub stamp: Stamp,
    /// Length of the whole value of a get.
    pub first: u64,
    /// Address of a reserved block; CRC of the block of the value of a get.
    pub second: u64,
    /// Part of the value that a get returns; otherwise empty.
    pub value: &'a [u8],
}

impl<'a> Answer<'a> {
    /// Creates an answer that has an outcome alone.
    pub fn of(outcome: Outcome) -> Answer<'static> {
        Answer { outcome, stamp: Stamp(0), first: 0, second: 0, value: &[] }
    }

    /// Appends the encoded answer to `bytes`.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&[self.outcome as u8, 0, 0, 0, 0, 0, 0, 0]);
        let numbers = [self.stamp.0, self.first, self.second];
        numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        bytes.extend_from_slice(self.value);
    }

    /// Decodes an answer; `None` if its outcome is unknown.
    pub fn decode(bytes: &'a [u8]) -> Option<Answer<'a>> {
        let (header, value) = bytes.split_first_chunk::<ANSWER_SIZE>()?;
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let outcome = match header[0] {
            0 => Outcome::Done,
            1 => Outcome::Absent,
            2 => Outcome::OutOfMemory,
            3 => Outcome::TableFull,
            4 => Outcome::Damaged,
            5 => Outcome::NotReserved,
            6 => Outcome::NotWritten,
            7 => Outcome::Changed,
            8 => Outcome::TooManyReservations,
            _ => return None,
        };
        Some(Answer { outcome, stamp: Stamp(number(8)), first: number(16), second: number(24), value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_encoding_and_nothing_else_is_accepted() {
        let (key, value) = (&b"key"[..], &b"value"[..]);
        let all = [
            Request::Get { key, offset: 7, stamp: Stamp(9) },
            Request::Contains { key },
            Request::Put { key, value },
            Request::Delete { key },
            Request::Reserve { key, number: u64::MAX, len: VALUE_MAX as u32, crc: u64::MAX },
            Request::Write { number: u64::MAX, offset: 5, bytes: value },
            Request::Commit { number: 3 },
            Request::Withdraw { number: 4 },
            Request::Hold { key },
            Request::Release { key, stamp: Stamp(u64::MAX) },
        ];
        for request in all {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            assert_eq!(Request::decode(&bytes), Ok(request));
            let reserved: &[usize] = if bytes[0] == RESERVE { &[1, 7] } else { &[1, 4, 7] };
            for &reserved in reserved {
                let mut bytes = bytes.clone();
                bytes[reserved] = 1;
                assert!(Request::decode(&bytes).is_err(), "{request:?} with byte {reserved} set");
            }
            bytes[0] = 99;
            assert!(Request::decode(&bytes).is_err());
        }
        let mut bytes = Vec::new();
        Request::Reserve { key, number: 1, len: VALUE_MAX as u32 + 1, crc: 0 }.encode(&mut bytes);
        assert!(Request::decode(&bytes).is_err(), "the value is too long");
    }

    #[test]
    fn answers_survive_encoding() {
        let answer =
            Answer { outcome: Outcome::Changed, stamp: Stamp(1), first: 2, second: 3, value: b"value" };
        let mut bytes = Vec::new();
        answer.encode(&mut bytes);
        assert_eq!(Answer::decode(&bytes), Some(answer));
        bytes[0] = 9;
        assert_eq!(Answer::decode(&bytes), None);
    }
}

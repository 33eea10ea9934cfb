//! Verifiable values with a checksum and a stamp, and a [`Ledger`] that checks that each key behaves as one register.
//!
//! Invariant: two values of one key differ in every word of their filler. So a value that mixes bytes of both fails
//! the checksum, wherever the bytes of one value end and those of the other value begin.
//! Invariant: a writer's sequence numbers start at 1 and are never used twice. 0 means that no value was written.

mod ledger;

use std::fmt;

use crc_fast::CrcAlgorithm;

pub use ledger::{Begun, Ledger, Written};

/// Offset of the key in a value: | checksum u64, of the bytes after it | key u64 | sequence u64 | writer u32 | filler
/// |, little-endian
const KEY: usize = 8;
const SEQUENCE: usize = 16;
const WRITER: usize = 24;

/// Length of the shortest value that can be verified, in bytes.
pub const VALUE_SIZE_MIN: usize = 28;

const _: () = assert!(VALUE_SIZE_MIN == WRITER + size_of::<u32>());

/// Identity of a value: the number of its writer, and its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Number of the value's writer.
    pub writer: u32,
    /// Sequence number among the writer's values, from 1.
    pub sequence: u64,
}

/// Fills `value` with its key, stamp, filler and checksum.
///
/// # Errors
/// `value` is shorter than [`VALUE_SIZE_MIN`].
pub fn encode(key: u64, writer: u32, sequence: u64, value: &mut [u8]) -> Result<(), TooSmall> {
    let size = value.len();
    let (header, filler) = value.split_at_mut_checked(VALUE_SIZE_MIN).ok_or(TooSmall { size })?;
    header[KEY..SEQUENCE].copy_from_slice(&key.to_le_bytes());
    header[SEQUENCE..WRITER].copy_from_slice(&sequence.to_le_bytes());
    header[WRITER..].copy_from_slice(&writer.to_le_bytes());
    fill(seed(key, writer, sequence), filler);
    let checksum = checksum(&value[KEY..]);
    value[..KEY].copy_from_slice(&checksum.to_le_bytes());
    Ok(())
}

/// Checks a value that was read from `key`, and returns its stamp.
///
/// # Errors
/// [`Violation::Torn`] if the checksum is wrong, [`Violation::OtherKey`] if the value belongs to another key.
pub fn check(key: u64, value: &[u8]) -> Result<Stamp, Violation> {
    let header: &[u8; VALUE_SIZE_MIN] = value.first_chunk().ok_or(Violation::Torn { key })?;
    if u64_at(header, 0) != checksum(&value[KEY..]) {
        return Err(Violation::Torn { key });
    }
    let found = u64_at(header, KEY);
    if found != key {
        return Err(Violation::OtherKey { key, found });
    }
    let [.., a, b, c, d] = *header;
    Ok(Stamp { writer: u32::from_le_bytes([a, b, c, d]), sequence: u64_at(header, SEQUENCE) })
}

/// Error: a value to encode is shorter than [`VALUE_SIZE_MIN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSmall {
    /// Length of the value in bytes.
    pub size: usize,
}

impl fmt::Display for TooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "values of {} bytes cannot be verified: at least {VALUE_SIZE_MIN} are needed", self.size)
    }
}

impl std::error::Error for TooSmall {}

/// Result that no read of a register may return, and that shows a fault of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The bytes read are not one whole value: they are mixed, truncated, or were never written.
    Torn {
        /// Key that was read.
        key: u64,
    },
    /// The value is whole, but belongs to another key.
    OtherKey {
        /// Key that was read.
        key: u64,
        /// Key to which the value belongs.
        found: u64,
    },
    /// The read returned an older value, which was replaced before the read started, or before another read.
    WentBack {
        /// Key that was read.
        key: u64,
        /// Stamp of the value that was read.
        read: Stamp,
        /// A newer value that was present before this read started; `None` if the value's own write did not run.
        newer: Option<Stamp>,
    },
    /// The read returned no value, although the key had a value before the read started.
    Missing {
        /// Key that was read.
        key: u64,
    },
    /// The value has a sequence number that its writer has not used in this run, so the value is left from an earlier
    /// run.
    NeverWritten {
        /// Key that was read.
        key: u64,
        /// Stamp of the value that was read.
        read: Stamp,
        /// The writer's last sequence number in this run.
        issued: u64,
    },
    /// The value was read, but the error of its put stated that the put did not run.
    NotRun {
        /// Key that was read.
        key: u64,
        /// Stamp of the value that was read.
        read: Stamp,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Torn { key } => write!(f, "key {key}: a torn value"),
            Self::OtherKey { key, found } => write!(f, "key {key}: the value of key {found}"),
            Self::WentBack { key, read: Stamp { writer, sequence }, newer } => {
                write!(f, "key {key} went back: to value {sequence} of writer {writer}")?;
                match newer {
                    Some(Stamp { writer, sequence }) => write!(f, " after {sequence} of writer {writer}"),
                    None => f.write_str(", whose put did not run"),
                }
            }
            Self::Missing { key } => write!(f, "key {key} went missing"),
            Self::NeverWritten { key, read: Stamp { writer, sequence }, issued } => {
                write!(f, "key {key}: value {sequence} of writer {writer}, which wrote only {issued} values")
            }
            Self::NotRun { key, read: Stamp { writer, sequence } } => {
                write!(f, "key {key}: value {sequence} of writer {writer} was read, but its put did not run")
            }
        }
    }
}

impl std::error::Error for Violation {}

/// Fills `filler` with words that depend on `seed` and on each word's position.
fn fill(seed: u64, filler: &mut [u8]) {
    let mut word = seed;
    for chunk in filler.chunks_mut(size_of::<u64>()) {
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    }
}

fn seed(key: u64, writer: u32, sequence: u64) -> u64 {
    let mix = |sum: u64, part: u64| (sum ^ part).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(32);
    mix(mix(mix(0, key), writer.into()), sequence)
}

fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// Decodes the 8 bytes at the offset `at`, a constant of this file that lies within the header.
fn u64_at(header: &[u8; VALUE_SIZE_MIN], at: usize) -> u64 {
    u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 6] = [VALUE_SIZE_MIN, 29, 36, 64, 512, 4096];

    fn value(key: u64, writer: u32, sequence: u64, size: usize) -> Vec<u8> {
        let mut value = vec![0xAA; size];
        encode(key, writer, sequence, &mut value).unwrap();
        value
    }

    #[test]
    fn a_value_identifies_its_writer() {
        for size in SIZES {
            let read = check(7, &value(7, 3, 41, size)).unwrap();
            assert_eq!(read, Stamp { writer: 3, sequence: 41 });
        }
        let extreme = Stamp { writer: u32::MAX, sequence: u64::MAX };
        assert_eq!(check(u64::MAX, &value(u64::MAX, u32::MAX, u64::MAX, 28)), Ok(extreme));
    }

    #[test]
    fn a_value_that_is_too_small_is_refused_with_the_minimum() {
        for size in [0, 8, VALUE_SIZE_MIN - 1] {
            let error = encode(1, 1, 1, &mut vec![0; size]).unwrap_err();
            assert_eq!(error, TooSmall { size });
            assert!(error.to_string().ends_with("at least 28 are needed"));
        }
    }

    #[test]
    fn a_value_torn_anywhere_is_a_violation() {
        let (old, new) = (value(7, 3, 41, 512), value(7, 3, 42, 512));
        for cut in (8..512).step_by(8) {
            let front_new = [&new[..cut], &old[cut..]].concat();
            let front_old = [&old[..cut], &new[cut..]].concat();
            for torn in [front_new, front_old] {
                assert_eq!(check(7, &torn), Err(Violation::Torn { key: 7 }), "cut at {cut}");
            }
        }
        for line in 0..8 {
            let mut torn = old.clone();
            torn[line * 64..(line + 1) * 64].copy_from_slice(&new[line * 64..(line + 1) * 64]);
            assert_eq!(check(7, &torn), Err(Violation::Torn { key: 7 }), "line {line}");
        }
    }

    #[test]
    fn invalid_bytes_are_a_violation() {
        let whole = value(7, 3, 41, 512);
        for bytes in [&[][..], &[0; 27], &[0; 28], &[0; 512], &whole[..511], &whole[..28]] {
            assert_eq!(check(7, bytes), Err(Violation::Torn { key: 7 }));
        }
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check(7, &flipped), Err(Violation::Torn { key: 7 }), "bit {bit}");
        }
    }

    #[test]
    fn another_keys_value_is_a_violation() {
        assert_eq!(check(8, &value(7, 3, 41, 64)), Err(Violation::OtherKey { key: 8, found: 7 }));
    }
}

//! The records of a Chequer store's log: all puts and deletes.
//!
//! ```text
//! record  | op u8 | place, bits 32 to 39 | key length u16 | place, bits 0 to 31 | stamp u64 | bucket u64 |
//!         | key | value's block |
//! place   | offset of the block in the partition's area, in units of 32 bytes |
//! bucket  | index of the bucket in the partition |
//! ```
//!
//! A record of a delete has no block, and the place 0. A checkpoint does not have the deletes. Instead it has the last
//! stamp of each partition, in a record without key and block that has the partition in the place of the bucket.
//!
//! A record may *take back* all earlier ones of its bucket, which were never answered: the bucket has the value of this
//! record, with its stamp, or no value.
//!
//! A replay puts each record and each block where it was. The records of an almost full table, and the blocks of an
//! almost full area, may fit in no other arrangement.
//!
//! Invariant: records of one bucket are in the log in the order of their stamps, so the newest stamp wins in every
//! replay. A bucket gets another key only once the delete of the key before was logged.

#[cfg(doc)]
use super::layout::BLOCK_ALIGN;
use super::layout::{Stamp, value_in};
use crate::kv::KEY_MAX;

/// Number of bytes of a record before its key.
pub const HEADER_SIZE: usize = 24;

const STAMP_OFFSET: usize = 8;
const BUCKET_OFFSET: usize = STAMP_OFFSET + size_of::<u64>();

// 1 and 2 were records without a bucket.
const PUT: u8 = 3;
const DELETE: u8 = 4;
const LAST: u8 = 5;
const PUT_TAKING_BACK: u8 = 6;
const DELETE_TAKING_BACK: u8 = 7;

/// A decoded record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logged<'a> {
    /// Stamp of the put or delete.
    pub stamp: Stamp,
    /// The key.
    pub key: &'a [u8],
    /// Block of the value ([`super::layout::put_block`]); `None` for a delete.
    pub block: Option<&'a [u8]>,
    /// Place of the block: its offset in the partition's area, in units of [`BLOCK_ALIGN`].
    pub place: u64,
    /// Index in the partition of the bucket of the key.
    pub bucket: u64,
    /// Whether the record takes back all earlier ones of the bucket.
    pub takes_back: bool,
}

/// Begins a record of a put in `bytes`, which it clears. The block of the value follows. Returns the block's offset in
/// `bytes`.
pub fn begin_put(bytes: &mut Vec<u8>, stamp: Stamp, key: &[u8], bucket: u64, place: u64) -> usize {
    begin(bytes, PUT, stamp, key, (bucket, place))
}

/// Encodes the record of a delete into `bytes`, which it clears.
pub fn put_delete(bytes: &mut Vec<u8>, stamp: Stamp, key: &[u8], bucket: u64) {
    begin(bytes, DELETE, stamp, key, (bucket, 0));
}

fn begin(bytes: &mut Vec<u8>, op: u8, stamp: Stamp, key: &[u8], (bucket, place): (u64, u64)) -> usize {
    bytes.clear();
    let [low, high] = (key.len() as u16).to_le_bytes();
    bytes.extend_from_slice(&[op, (place >> 32) as u8, low, high]);
    bytes.extend_from_slice(&(place as u32).to_le_bytes());
    bytes.extend_from_slice(&stamp.0.to_le_bytes());
    bytes.extend_from_slice(&bucket.to_le_bytes());
    bytes.extend_from_slice(key);
    bytes.len()
}

/// Encodes the record of the last stamp of a partition into `bytes`, which it clears.
pub fn put_last(bytes: &mut Vec<u8>, stamp: Stamp, partition: u64) {
    begin(bytes, LAST, stamp, &[], (partition, 0));
}

/// Decodes a record of the last stamp of a partition. `None` for any other record.
pub fn last(bytes: &[u8]) -> Option<(u64, Stamp)> {
    let &[LAST, 0, 0, 0, 0, 0, 0, 0, ref numbers @ ..] = bytes.first_chunk::<HEADER_SIZE>()? else {
        return None;
    };
    let number = |at: usize| u64::from_le_bytes(numbers[at..at + 8].try_into().expect("eight bytes"));
    let stamp = Stamp(number(0));
    (bytes.len() == HEADER_SIZE && stamp.has_next()).then(|| (number(8), stamp))
}

/// Sets the stamp of the record in `bytes`.
pub fn set_stamp(bytes: &mut [u8], stamp: Stamp) {
    bytes[STAMP_OFFSET..BUCKET_OFFSET].copy_from_slice(&stamp.0.to_le_bytes());
}

/// Makes the record of a put or delete in `bytes` take back all earlier ones of its bucket.
pub fn set_takes_back(bytes: &mut [u8]) {
    bytes[0] = if bytes[0] == PUT { PUT_TAKING_BACK } else { DELETE_TAKING_BACK };
}

impl<'a> Logged<'a> {
    /// Decodes a record.
    ///
    /// # Errors
    /// The bytes are no record of this release.
    pub fn decode(bytes: &'a [u8]) -> Result<Logged<'a>, String> {
        let wrong = || "a record of the log is not understood: use the release that wrote it".to_owned();
        let (header, rest) = bytes.split_first_chunk::<HEADER_SIZE>().ok_or_else(wrong)?;
        let &[op, top, low, high, a, b, c, d, ..] = header;
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let place = u64::from(top) << 32 | u64::from(u32::from_le_bytes([a, b, c, d]));
        let (key, block) = rest.split_at_checked(u16::from_le_bytes([low, high]).into()).ok_or_else(wrong)?;
        let (stamp, bucket) = (Stamp(number(STAMP_OFFSET)), number(BUCKET_OFFSET));
        let block = match op {
            PUT | PUT_TAKING_BACK if value_in(block, key).is_some() => Some(block),
            DELETE | DELETE_TAKING_BACK if block.is_empty() => None,
            _ => return Err(wrong()),
        };
        let takes_back = [PUT_TAKING_BACK, DELETE_TAKING_BACK].contains(&op);
        if (1..=KEY_MAX).contains(&key.len()) && stamp.has_next() {
            Ok(Logged { stamp, key, block, place, bucket, takes_back })
        } else {
            Err(wrong())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::chequer::layout::put_block;

    #[test]
    fn records_survive_encoding_and_damaged_ones_are_refused() {
        let mut bytes = Vec::new();
        for key in [&b"key"[..], &[7; 100]] {
            let (bucket, place) = (1 << 33, (1 << 40) - 2);
            let at = begin_put(&mut bytes, Stamp(5), key, bucket, place);
            put_block(&mut bytes, key, b"value");
            let logged =
                Logged { stamp: Stamp(5), key, block: Some(&bytes[at..]), place, bucket, takes_back: false };
            assert_eq!(Logged::decode(&bytes), Ok(logged));
            let mut taking_back = bytes.clone();
            set_takes_back(&mut taking_back);
            assert_eq!(Logged::decode(&taking_back), Ok(Logged { takes_back: true, ..logged }));
            assert!(Logged::decode(&bytes[..bytes.len() - 1]).is_err());
            put_delete(&mut bytes, Stamp(6), key, bucket);
            let logged = Logged { stamp: Stamp(6), key, block: None, place: 0, bucket, takes_back: false };
            assert_eq!(Logged::decode(&bytes), Ok(logged));
            let mut taking_back = bytes.clone();
            set_takes_back(&mut taking_back);
            assert_eq!(Logged::decode(&taking_back), Ok(Logged { takes_back: true, ..logged }));
            assert!(Logged::decode(&bytes[..HEADER_SIZE - 1]).is_err());
            set_stamp(&mut bytes, Stamp(u64::MAX));
            assert!(Logged::decode(&bytes).is_err(), "no stamp follows it");
            put_last(&mut bytes, Stamp(8), 3);
            assert_eq!((last(&bytes), Logged::decode(&bytes).is_err()), (Some((3, Stamp(8))), true));
            put_last(&mut bytes, Stamp::new(Stamp::EPOCH_MAX - 1, 0), 3);
            assert_eq!((last(&bytes), Logged::decode(&bytes).is_err()), (None, true));
            put_delete(&mut bytes, Stamp(6), key, bucket);
            assert_eq!(last(&bytes), None);
            for op in [1, 2, 5, 8] {
                bytes[0] = op;
                assert!(Logged::decode(&bytes).is_err(), "operation {op}");
            }
        }
    }
}

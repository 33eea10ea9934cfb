//! Layout of a table of leased client ids, which clients write and the node reads.
//!
//! ```text
//! table | entry 32 bytes | x ids                                    entry i is that of the id i + 1
//! entry | nonce u64, 0 if free | beat u64 | epoch u64 | reservation u64       the last two are big-endian
//! ```
//!
//! The *epoch* of an id says which operations of its holder have ended. While it is E, all operations that the holder
//! began before its epoch E - 1 was acknowledged have ended. All timestamps of the id are below its *reservation*.
//! Neither word ever falls, not even when the id is leased again. They are big-endian, so that a CAS can raise them if
//! they are lower.
//!
//! Invariant: a holder raises its epoch at every member that holds buffers to which its operations may have pointers.

/// Size of an entry in bytes.
pub const ENTRY_SIZE: u64 = 32;
/// Offset of the epoch in an entry, in bytes.
pub const EPOCH_OFFSET: u64 = 16;
/// Offset of the reservation in an entry, in bytes.
pub const RESERVATION_OFFSET: u64 = 24;

/// Location of a table of leases in a store's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTable {
    /// Address of the first entry.
    pub at: u64,
    /// Number of ids.
    pub ids: u16,
}

impl LeaseTable {
    /// Address of the entry with this index.
    pub const fn entry_at(&self, index: u16) -> u64 {
        self.at + index as u64 * ENTRY_SIZE
    }
}

/// Holder and epoch of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Nonce of the id's holder; 0 if the id is free.
    pub nonce: u64,
    /// Published epoch of the id.
    pub epoch: u64,
}

impl Holder {
    /// Decodes an entry. Every sequence of bytes is an entry.
    pub fn of(entry: &[u8; ENTRY_SIZE as usize]) -> Holder {
        let word = |at: usize| -> [u8; 8] { entry[at..at + 8].try_into().expect("eight bytes") };
        Holder { nonce: u64::from_le_bytes(word(0)), epoch: u64::from_be_bytes(word(EPOCH_OFFSET as usize)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_decoded_by_its_layout() {
        let mut entry = [0; ENTRY_SIZE as usize];
        assert_eq!(Holder::of(&entry), Holder { nonce: 0, epoch: 0 });
        (entry[0], entry[8], entry[23]) = (7, 9, 5);
        assert_eq!(Holder::of(&entry), Holder { nonce: 7, epoch: 5 });
        assert_eq!(LeaseTable { at: 64, ids: 3 }.entry_at(2), 128);
    }
}

//! Redo records: how an object that is updated in place survives the death of its writer.
//!
//! A writer can die in the middle of a WRITE: a client that runs its chains itself, or a node whose memory lies in a
//! file. So the chain that updates an object first writes the object's new bytes to a *record* of its client. Whoever
//! recovers the dead client's lock completes the update from the record.
//!
//! ```text
//! area   | count of tokens u64 | 0 x 56 | record | x lanes          one area for each client id
//! record | lock word u64 | address u64 | length u64 | bytes, to a multiple of 8 | checksum u64 |
//! ```
//!
//! The chain of an update is: WRITE the record, WRITE the object, free the lock by CAS or WRITE. A recovery is: WRITE
//! the recoverer's own record with the same bytes, take the lock by CAS from the dead client's word to the recoverer's,
//! WRITE the object, free the lock. It is one chain ([`Recovery::chain`]), or two ([`Recovery::take`] and
//! [`Record::finish`]). A recoverer may die at any point, too: until it has taken the lock, the dead client's record
//! counts, and afterwards its own.
//!
//! Invariant: a record counts only while the lock has the word that is in the record. The checksum covers the word, and
//! no two operations have the same word. So no stale record is redone over a newer value.
//! Invariant: an object is not touched before the record of the update is complete.

use crate::lease::{ClientId, Entry, Fenced, LockWord};
use farside_remote::fabric::Ran;
use farside_remote::{
    Addr, Chain, ChainBuf, Fabric, FabricError, Key, Mode, NodeId, Out, Reply, Status, cas, fetch_add, write,
};
use std::cell::Cell;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Mutants of redo records and of their recovery.
pub mod mutants {
    farside_remote::mutants! {
        /// The object is written before its record.
        RECORD_AFTER_OBJECT = "RedoRecordAfterObject";
        /// The recoverer takes the lock before it has written a record of its own.
        TAKEN_BEFORE_OWN_RECORD = "RedoTakenBeforeOwnRecord";
        /// The recoverer frees the lock before it has written the object.
        FREED_FIRST = "RedoFreedFirst";
        /// The checksum does not cover the lock's word.
        TOKEN_NOT_IN_CHECKSUM = "RedoTokenNotInChecksum";
        /// A complete record is redone even if the lock has another word.
        STALE_RECORD_REDONE = "RedoStaleRecordRedone";
    }
}

const HEAD_SIZE: usize = size_of::<Head>();
const CHECKSUM_SIZE: usize = size_of::<U64>();
/// Size of the count of tokens, which has a cache line of its own.
const TOKENS_SIZE: u64 = 64;
/// Number of operations of each lane for which one FETCH-ADD reserves tokens.
const RESERVED: u64 = 1 << 16;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    word: LockWord,
    at: U64,
    len: U64,
}

/// Location of the records of a store's clients at one member.
#[derive(Clone, Copy, Debug)]
pub struct Areas {
    /// Node of the member.
    pub node: NodeId,
    /// Key of the store at this member.
    pub key: Key,
    /// Address of the first area.
    pub at: Addr,
    /// Number of records of each client.
    pub lanes: u16,
    /// Largest number of bytes that one update writes.
    pub len_max: u32,
}

impl Areas {
    /// Number of bytes of a record.
    pub const fn record_len(&self) -> u32 {
        (HEAD_SIZE + CHECKSUM_SIZE) as u32 + self.len_max.next_multiple_of(8)
    }

    /// Distance between two records in bytes, a multiple of a cache line.
    const fn record_size(&self) -> u64 {
        (self.record_len() as u64).next_multiple_of(64)
    }

    /// Size of a client's area in bytes.
    pub const fn area_size(&self) -> u64 {
        TOKENS_SIZE + self.lanes as u64 * self.record_size()
    }

    fn area(&self, id: ClientId) -> Addr {
        self.at.plus(id.index() * self.area_size())
    }

    /// Address of the record of the operation with this word.
    ///
    /// # Panics
    /// If the word is that of a free lock.
    pub fn record(&self, word: LockWord) -> Addr {
        let owner = word.owner().expect("a free lock has no record");
        let lane = word.token() % u64::from(self.lanes);
        self.area(owner).plus(TOKENS_SIZE + lane * self.record_size())
    }
}

/// Tokens that a client has reserved at one member and not yet used. The member counts the tokens of each id for ever,
/// so that no holder of the id reuses one.
#[derive(Debug, Default)]
pub struct Tokens {
    next: Cell<u64>,
    end: Cell<u64>,
}

impl Tokens {
    /// Returns the word of the next operation of a lane. Reserves tokens if none are left, with one FETCH-ADD.
    ///
    /// # Errors
    /// [`RedoError`]. Reserved tokens of a lost answer are never used.
    pub async fn next(
        &self,
        fabric: &impl Fabric,
        areas: &Areas,
        id: ClientId,
        lane: u16,
    ) -> Result<LockWord, RedoError> {
        if self.next.get() == self.end.get() {
            let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
            let addend = U64::new(RESERVED);
            let mut chain = buffer.begin(areas.key);
            let first = chain.also(fetch_add(areas.area(id), &addend));
            fabric
                .run(areas.node, &chain, &mut reply)
                .await
                .map_err(|error| RedoError::Fabric(error.map_ran(|_| Ran::No)))?;
            let first = reply.get(first).map_err(RedoError::Refused)?.get();
            // A client that holds the store's key may have written any count.
            let end = first.checked_add(RESERVED).ok_or(RedoError::NoTokens)?;
            // Another lane may have reserved tokens at the same time.
            self.next.set(first);
            self.end.set(end);
        }
        let next = self.next.replace(self.next.get() + 1);
        let token = next.checked_mul(areas.lanes.into()).map(|token| token + u64::from(lane));
        token.and_then(|token| LockWord::new(id, token)).ok_or(RedoError::NoTokens)
    }
}

/// Reason why an update or a recovery failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedoError {
    /// The id has used all its tokens.
    NoTokens,
    /// The node refused a chain with this status.
    Refused(Status),
    /// A record names bytes that are not those of the object whose lock is recovered.
    Damaged,
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl std::fmt::Display for RedoError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RedoError::NoTokens => f.write_str(
                "this client's id has used all tokens of its locks, and nothing was changed: open the store again, \
                 under another id",
            ),
            RedoError::Refused(status) => {
                write!(f, "the node refused the redo record's chain ({status}): open the store again")
            }
            RedoError::Damaged => f.write_str(
                "the store is damaged (a redo record of another object): someone who holds its key has overwritten it",
            ),
            RedoError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RedoError {}

/// Object that is updated in place under a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// Address of the lock's word.
    pub lock: Addr,
    /// Address of the first byte that an update writes.
    pub at: Addr,
    /// Number of bytes that an update writes.
    pub len: u32,
}

/// Encoded record of one update. The buffer is reused.
#[derive(Clone, Debug, Default)]
pub struct Record {
    word: LockWord,
    bytes: Vec<u8>,
}

impl Record {
    /// Encodes the record of an update of `object` by the holder of its lock with `word`.
    ///
    /// # Panics
    /// If `bytes` are not as many as the object has.
    pub fn fill(&mut self, word: LockWord, object: &Object, bytes: &[u8]) {
        assert_eq!(bytes.len(), object.len as usize, "an update writes the whole object");
        self.word = word;
        let head = Head { word, at: U64::new(object.at.raw()), len: U64::new(object.len.into()) };
        self.bytes.clear();
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(HEAD_SIZE + bytes.len().next_multiple_of(8), 0);
        let checksum = U64::new(checksum(&self.bytes));
        self.bytes.extend_from_slice(checksum.as_bytes());
    }

    /// Bytes of the record.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Word of the lock under which the record counts.
    pub fn word(&self) -> LockWord {
        self.word
    }

    /// Bytes of the object in this record.
    pub(crate) fn of_object(&self, object: &Object) -> &[u8] {
        &self.bytes[HEAD_SIZE..][..object.len as usize]
    }

    /// Appends the second part of a recovery that [`Recovery::take`] has begun: the object, and the lock's release,
    /// unless the object's bytes have the lock, and have it free.
    pub fn finish<'a>(&'a self, chain: &mut Chain<'a>, object: &Object) {
        chain.also(write(object.at, self.of_object(object)));
        if !self.frees_lock(object) {
            chain.also(cas(Mode::Eq, object.lock, &self.word, &LockWord::FREE));
        }
    }

    /// Whether the WRITE of the object frees its lock.
    fn frees_lock(&self, object: &Object) -> bool {
        let from = object.lock.raw().checked_sub(object.at.raw()).map(|from| from as usize);
        let word = from.and_then(|from| self.of_object(object).get(from..from + size_of::<LockWord>()));
        word == Some(LockWord::FREE.as_bytes())
    }

    /// Appends an update to a chain: the record, the object, and the release of the lock, which the writer holds. The
    /// chain may run again, as a whole, as long as the lock has the record's word. Returns the release's result.
    pub fn update<'a>(&'a self, chain: &mut Chain<'a>, areas: &Areas, object: &Object) -> Out<LockWord> {
        let record = write(areas.record(self.word), &self.bytes);
        let update = write(object.at, self.of_object(object));
        if mutants::RECORD_AFTER_OBJECT.is_on() {
            chain.also(update);
            chain.then(record);
        } else {
            chain.also(record);
            chain.then(update);
        }
        chain.then(cas(Mode::Eq, object.lock, &self.word, &LockWord::FREE))
    }
}

/// Length of an [`intent`] in bytes.
pub(crate) const INTENT_LEN: u32 = HEAD_SIZE as u32;

/// Encodes the start of a record: an *intent*, which says that the operation with this word is about to lock `object`.
/// It is written in place of the lane's last record, before the lock is taken. So a recoverer finds the locks of a dead
/// client in its records. An intent alone is no complete record.
pub(crate) fn intent(word: LockWord, object: &Object) -> [u8; HEAD_SIZE] {
    let mut bytes = [0; HEAD_SIZE];
    let head = Head { word, at: U64::new(object.at.raw()), len: U64::new(object.len.into()) };
    bytes.copy_from_slice(head.as_bytes());
    bytes
}

/// Decodes an intent, or the start of a record: the word, and the address and the length of the bytes that it names.
pub(crate) fn intended(record: &[u8]) -> Option<(LockWord, u64, u64)> {
    let (head, _) = Head::read_from_prefix(record).ok()?;
    Some((head.word, head.at.get(), head.len.get()))
}

/// Returns the bytes of the object that a complete record has for the lock's present `word`. Returns `None` if the
/// record is incomplete, or that of another operation: then the operation that holds the lock has not touched the
/// object.
///
/// # Errors
/// [`RedoError::Damaged`].
pub fn complete<'a>(
    record: &'a [u8],
    word: LockWord,
    object: &Object,
) -> Result<Option<&'a [u8]>, RedoError> {
    let Ok((head, rest)) = Head::read_from_prefix(record) else { return Ok(None) };
    let is_stale = head.word != word && !mutants::STALE_RECORD_REDONE.is_on();
    let len = usize::try_from(head.len.get()).unwrap_or(usize::MAX);
    let padded = len.checked_next_multiple_of(8).filter(|padded| *padded <= rest.len());
    let Some(padded) = padded.filter(|_| !is_stale) else { return Ok(None) };
    let Ok((found, _)) = U64::read_from_prefix(&rest[padded..]) else { return Ok(None) };
    if found.get() != checksum(&record[..HEAD_SIZE + padded]) {
        return Ok(None);
    }
    if head.at.get() != object.at.raw() || head.len.get() != u64::from(object.len) {
        return Err(RedoError::Damaged);
    }
    Ok(Some(&rest[..len]))
}

fn checksum(record: &[u8]) -> u64 {
    let skipped = if mutants::TOKEN_NOT_IN_CHECKSUM.is_on() { size_of::<LockWord>() } else { 0 };
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &record[skipped..])
}

/// What the recoverer of a lock has to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Recovery {
    /// The lock is not the fenced client's any more.
    Over,
    /// The operation has not touched the object: free the lock.
    Free(LockWord),
    /// The recoverer's record is filled: run [`Recovery::chain`].
    Redo(LockWord),
}

impl Recovery {
    /// Decides how to recover an object's lock from a fenced client. `word` is the lock's word, and `entry` and `found`
    /// are the entry of the word's owner and the record of the word, which were read after it, and after the fence.
    /// Fills `own` with the record of the recoverer's operation, if there is something to redo.
    ///
    /// # Errors
    /// [`RedoError::Damaged`].
    pub fn of(
        fenced: &Fenced,
        object: &Object,
        (word, entry, found): (LockWord, Entry, &[u8]),
        (own, own_word): (&mut Record, LockWord),
    ) -> Result<Recovery, RedoError> {
        if !fenced.owns(word, entry) {
            return Ok(Recovery::Over);
        }
        Ok(match complete(found, word, object)? {
            Some(bytes) => {
                own.fill(own_word, object, bytes);
                Recovery::Redo(word)
            }
            None => Recovery::Free(word),
        })
    }

    /// Appends the first part of the recovery to a chain, for fabrics without conditional ops: frees the lock, or
    /// takes it in the recoverer's name, once the recoverer's record is complete. Returns the result of the CAS. If it
    /// swapped and something is to be redone, [`Record::finish`] of the recoverer's record follows, in a chain of its
    /// own.
    ///
    /// # Panics
    /// If the recovery is over.
    pub fn take<'a>(
        &'a self,
        chain: &mut Chain<'a>,
        areas: &Areas,
        object: &Object,
        own: &'a Record,
    ) -> Out<LockWord> {
        match self {
            Recovery::Over => panic!("the recovery is over"),
            Recovery::Free(word) => chain.also(cas(Mode::Eq, object.lock, word, &LockWord::FREE)),
            Recovery::Redo(word) => {
                chain.also(write(areas.record(own.word), &own.bytes));
                chain.also(cas(Mode::Eq, object.lock, word, &own.word))
            }
        }
    }

    /// Appends the recovery to a chain. After the chain, the lock is free, or it is not the fenced client's. If the
    /// chain's outcome is unknown, and the lock has the word of `own`, the recoverer continues as after an update of
    /// its own.
    pub fn chain<'a>(&'a self, chain: &mut Chain<'a>, areas: &Areas, object: &Object, own: &'a Record) {
        let free = |word: &'a LockWord| cas(Mode::Eq, object.lock, word, &LockWord::FREE);
        match self {
            Recovery::Over => {}
            Recovery::Free(word) => _ = chain.also(free(word)),
            Recovery::Redo(word) => {
                let record = write(areas.record(own.word), &own.bytes);
                let take = cas(Mode::Eq, object.lock, word, &own.word);
                let update = write(object.at, own.of_object(object));
                if mutants::FREED_FIRST.is_on() {
                    chain.also(free(word));
                    chain.then(update);
                    return;
                }
                if mutants::TAKEN_BEFORE_OWN_RECORD.is_on() {
                    chain.also(take);
                } else {
                    chain.also(record);
                    chain.then(take);
                }
                chain.then(update);
                chain.then(free(&own.word));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: Object = Object { lock: Addr::new(4096), at: Addr::new(4104), len: 100 };

    fn word(token: u64) -> LockWord {
        LockWord::new(ClientId::new(3).expect("not 0"), token).expect("48 bits")
    }

    #[test]
    fn a_record_counts_only_if_it_is_whole_and_of_the_locks_word() {
        let mut record = Record::default();
        record.fill(word(7), &OBJECT, &[5; 100]);
        assert_eq!(complete(record.as_bytes(), word(7), &OBJECT), Ok(Some(&[5; 100][..])));
        assert_eq!(complete(record.as_bytes(), word(8), &OBJECT), Ok(None), "a stale record");
        for at in 0..record.bytes.len() {
            let mut torn = record.bytes.clone();
            torn[at] ^= 1;
            assert_eq!(complete(&torn, word(7), &OBJECT), Ok(None), "byte {at} differs");
            assert_eq!(complete(&record.bytes[..at], word(7), &OBJECT), Ok(None), "the first {at} bytes");
        }
        // The head of the next operation's record, before the bytes of the last operation's.
        let mut next = record.bytes.clone();
        next[..HEAD_SIZE]
            .copy_from_slice(Head { word: word(8), at: U64::new(4104), len: U64::new(100) }.as_bytes());
        assert_eq!(complete(&next, word(8), &OBJECT), Ok(None));
        let other = Object { at: Addr::new(8200), ..OBJECT };
        assert_eq!(complete(record.as_bytes(), word(7), &other), Err(RedoError::Damaged));
    }

    #[test]
    fn any_bytes_are_a_record_or_none() {
        for len in 0..200_usize {
            for fill in [0, 1, 0x7f, 0x80, 0xff] {
                assert_eq!(complete(&vec![fill; len], word(7), &OBJECT), Ok(None));
            }
        }
        let mut huge = Head { word: word(7), at: U64::new(4104), len: U64::MAX_VALUE }.as_bytes().to_vec();
        huge.resize(200, 0);
        assert_eq!(complete(&huge, word(7), &OBJECT), Ok(None));
    }

    #[test]
    fn records_of_different_clients_and_lanes_do_not_overlap() {
        let (key, at) = (Key::new(1, 1), Addr::new(0));
        let areas = Areas { node: NodeId(0), key, at, lanes: 3, len_max: 100 };
        let mut starts: Vec<u64> = (1..=4_u16)
            .flat_map(|id| (0..3).map(move |token| (id, token)))
            .map(|(id, token)| LockWord::new(ClientId::new(id).expect("not 0"), token).expect("48 bits"))
            .map(|word| areas.record(word).raw())
            .collect();
        starts.push(4 * areas.area_size());
        assert!(
            starts.windows(2).all(|pair| pair[0] + u64::from(areas.record_len()) <= pair[1]),
            "{starts:?}"
        );
        assert_eq!(areas.record(word(0)), areas.record(word(3)));
    }
}

//! A client's session with the members of a store, and how it finds the locks of a dead client.
//!
//! The locks of a member lie together, and a recoverer reads all of them. It finds those of the dead client by the id
//! in their words. The word selects the record.
//!
//! A lock keeps its word when it is handed over to another lane, until that lane changes the node: then the lane writes
//! its own word first. So the word is that of the last change under the lock. If its record is still there, the record
//! has the bytes that the node has, or should have.

use super::layout::{Damaged, Layout, LockAt};
use crate::index::IndexError;
use crate::index::place::Member;
use crate::index::session::{Locked, Terms};
use crate::lease::{ClientId, LockWord};
use crate::redo::{self, Object};
use farside_remote::clock::Clock;
use farside_remote::{Addr, Fabric};

pub(super) use crate::index::session::refused;

/// A client's session with all members of a store.
pub(super) type Session<F> = crate::index::session::Session<F, Layout>;

impl Locked for Layout {
    type Lock = LockAt;

    fn members(&self) -> &[Member] {
        &self.members
    }

    fn terms(&self) -> Terms {
        Terms { ids: self.spec.ids, lanes: self.spec.lanes, lease: self.spec.lease() }
    }

    async fn held<F: Fabric + Clock>(
        session: &Session<F>,
        id: ClientId,
    ) -> Result<Vec<(LockWord, LockAt)>, IndexError> {
        let locks = session.locks().await?.into_iter();
        Ok(locks.filter(|(word, _)| word.owner() == Some(id)).collect())
    }

    fn member_of(lock: LockAt) -> usize {
        lock.member
    }

    /// A record of another operation names other bytes, and does not count: then only the lock is freed.
    fn object(&self, at: LockAt, word: LockWord, record: &[u8]) -> Result<Object, Damaged> {
        let lock = self.addr(self.lock(at), 8)?;
        Ok(match redo::intended(record) {
            Some((of, bytes_at, len)) if of == word && self.guards(at, bytes_at, len) => {
                Object { lock, at: Addr::new(bytes_at), len: len as u32 }
            }
            _ => Object { lock, at: lock, len: 0 },
        })
    }
}

impl<F: Fabric + Clock> Session<F> {
    /// Reads all locks that are held.
    pub(super) async fn locks(&self) -> Result<Vec<(LockWord, LockAt)>, IndexError> {
        let (count, mut held) = (u64::from(self.layout.spec.locks), Vec::new());
        for member in 0..self.layout.members.len() {
            let first = self.layout.lock(LockAt { member, index: 0 });
            for (index, word) in (0..).zip(self.words(first, count).await?) {
                let word = LockWord::of_bits(word);
                if !word.is_free() {
                    held.push((word, LockAt { member, index }));
                }
            }
        }
        Ok(held)
    }
}

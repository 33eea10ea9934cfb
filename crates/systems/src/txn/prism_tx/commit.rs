//! Commit: at each shard, the word becomes DECIDED, and then the new items are installed, in one chain.
//!
//! ```text
//! CAS word: ACTIVE -> DECIDED; WRITE scratch: TS
//! per key:  ALLOCATE item, its address to scratch; then CAS(LT, C, TS), swaps C and the address
//! ```
//!
//! An install that does not swap is still a commit: a later transaction has overwritten the value. The chain then
//! retires the new item. A chain whose outcome is unknown is repeated: a second run of it, at whatever time, changes
//! nothing.
//!
//! If no buffer of an item's class is free, a chain that decides fails, and nothing was changed. What is decided takes
//! a larger buffer, or one of the store's reserve. If there is none, it waits: deletes free memory.
//!
//! Invariant: the client reports success once all shards have answered.
//! Invariant: the installs of a shard follow DECIDED at this shard.

use super::execute::{TMP, TMP_ADDRESS};
use super::layout::{
    ADDRESS_OFFSET, EntryId, HEADER_SIZE, ItemHeader, Settled, State, Timestamp, Word, Write,
};
use super::site::{Buffers, Site};
use super::transaction::{Lane, LaneShard, Part, of_parts};
use super::{Client, PATIENCE, mutants};
use crate::members::all;
use crate::ready::{once, pauses};
use crate::txn::{Committed, TxnError, Version};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::op::cas_with;
use farside_remote::{Fabric, Mode, Status, allocate, cas, write};
use zerocopy::IntoBytes;

/// Number of items that one chain installs, and their bytes in all.
const ITEMS_PER_CHAIN: usize = 16;
const BYTES_PER_CHAIN: usize = 56 * 1024;

/// Attempt to commit a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// Nothing is decided.
    First,
    /// A shard may have DECIDED.
    Later,
}

/// Where the items of an install are from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// From a transaction of this client with this entry, whose word becomes DECIDED before.
    Own(EntryId, Attempt),
    /// From the log of a dead client.
    Log,
}

/// Outcome of the installs of a shard. The error is that of a chain, and the flag says whether a chain has run or may
/// have run.
type Installed = Result<(), (bool, TxnError)>;

impl<F: Fabric + Clock> Client<F> {
    /// Commits a prepared transaction.
    ///
    /// # Errors
    /// [`TxnError`]; if no chain of the commit has run, the transaction is aborted.
    pub(super) async fn commit(
        &self,
        lane: &mut Lane,
        parts: &[Part<'_>],
        ts: Timestamp,
    ) -> Result<Committed, TxnError> {
        let outcomes = self.install_all(lane, parts, ts, Attempt::First).await;
        if outcomes.iter().all(|outcome| matches!(outcome, Err((false, _)))) {
            self.abort(lane, parts, ts).await;
            let error = outcomes.into_iter().find_map(Result::err).map(|(_, error)| error);
            return Err(error.unwrap_or(TxnError::Conflict));
        }
        match outcomes.into_iter().find_map(Result::err) {
            None => {}
            Some(_) if mutants::SUCCESS_BEFORE_INSTALLS.is_on() => {
                self.leave(lane);
                return Ok(Committed { version: Some(Version(ts.bits())) });
            }
            Some(_) if self.install_again(lane, parts, ts).await.is_ok() => {}
            Some((_, error)) => {
                self.leave(lane);
                return Err(TxnError::Unknown(Box::new(error)));
            }
        }
        let Lane { shards, .. } = lane;
        for own in of_parts(shards, parts.iter().filter(|part| part.has_writes()).map(|part| part.shard)) {
            own.word = Some(Word::new(ts, State::Decided));
        }
        Ok(Committed { version: Some(Version(ts.bits())) })
    }

    async fn install_all(
        &self,
        lane: &mut Lane,
        parts: &[Part<'_>],
        ts: Timestamp,
        attempt: Attempt,
    ) -> Vec<Installed> {
        let entry = self.session.entry(lane.number);
        let written = || parts.iter().filter(|part| part.has_writes());
        let of = of_parts(&mut lane.shards, written().map(|part| part.shard));
        let installs = of.into_iter().zip(written()).map(|(own, part)| async move {
            let LaneShard { buffers, .. } = own;
            self.site.install(part.shard, buffers, Source::Own(entry, attempt), ts, &part.writes()).await
        });
        all(installs).await
    }

    /// Repeats the commit at all shards until they answer.
    async fn install_again(
        &self,
        lane: &mut Lane,
        parts: &[Part<'_>],
        ts: Timestamp,
    ) -> Result<(), TxnError> {
        let goes_on = || !self.session.is_given_up();
        let again = async || {
            let outcomes = self.install_all(lane, parts, ts, Attempt::Later).await;
            outcomes.into_iter().find_map(Result::err).map_or(Ok(()), |(_, error)| Err(error))
        };
        self.site.persist(PATIENCE, goes_on, again).await
    }
}

/// Class of the buffers for an item with this key and value, which have valid lengths.
pub(super) fn class_of(key: &[u8], value: Option<&[u8]>) -> &'static Class {
    Class::for_len(HEADER_SIZE + key.len() + value.map_or(0, <[u8]>::len))
        .expect("the longest value has a limit")
}

/// Class of the buffer for an item, and whether it may be one of the store's reserve. On the first try, it is the
/// item's own class. On each later one, it is the next larger class, up to the largest class of the store's items.
/// On the last try, it is a buffer of that class from the reserve: so the reserve's segment suits all items, whatever
/// item takes it. `None` after the last try.
fn class_for(exact: &'static Class, largest: &'static Class, tries: u8) -> Option<(&'static Class, bool)> {
    let larger = Class::get(exact.index + tries).filter(|class| class.index <= largest.index);
    match larger {
        Some(class) => Some((class, false)),
        None if exact.index + tries == largest.index + 1 => Some((largest, true)),
        None => None,
    }
}

impl<F: Fabric + Clock> Site<F> {
    /// Installs items at a member.
    pub(super) async fn install(
        &self,
        shard: usize,
        own: &mut Buffers,
        source: Source,
        ts: Timestamp,
        writes: &[Write<'_>],
    ) -> Installed {
        let shard = &self.shards[shard];
        let (active, decided) = (Word::new(ts, State::Active), Word::new(ts, State::Decided));
        let (entry, is_decided) = match source {
            Source::Own(entry, attempt) => (Some(entry), attempt == Attempt::Later),
            Source::Log => (None, true),
        };
        let largest = Class::for_len(shard.spec().item_max()).expect("the longest value has a limit");
        let is_delete = writes.iter().all(|write| write.value.is_none());
        let (mut left, mut has_run, mut tries, mut pauses) = (writes, false, 0, pauses());
        while !left.is_empty() {
            // After the first try, one item at a time: the others may find buffers of their own classes.
            let (now, later) = left.split_at(if tries == 0 { fitting(left) } else { 1 });
            let header = |write: &Write<'_>| ItemHeader::new(ts, write.key, write.value);
            let headers: Vec<ItemHeader<Timestamp>> = now.iter().map(header).collect();
            let mut chain = own.chain.begin(shard.key());
            let decides = entry.filter(|_| !has_run);
            let is_late = mutants::DECIDED_LATE.is_on();
            let decide = |entry| cas(Mode::Eq, shard.word(entry), &active, &decided);
            let mut word = decides.filter(|_| !is_late).map(|entry| chain.also(decide(entry)));
            chain.also(write(TMP, ts.as_bytes()));
            let mut is_last_try = false;
            for (of, header) in now.iter().zip(&headers) {
                let value = of.value.unwrap_or_default();
                if HEADER_SIZE + of.key.len() + value.len() > shard.spec().item_max() {
                    return Err((has_run, TxnError::Damaged("an item that is too long")));
                }
                let exact = class_of(of.key, of.value);
                let (class, is_reserve) = class_for(exact, largest, tries).unwrap_or((largest, true));
                is_last_try |= is_reserve;
                let item = allocate(class.list(), [header.as_bytes(), of.key, value]);
                let item = if is_reserve { item.from_reserve() } else { item };
                chain.also(item.redirect(TMP_ADDRESS));
                let at = shard.settled(of.slot);
                if mutants::VERSION_APART.is_on() {
                    chain.then(cas_with::<Settled>(Mode::Lt, at, TMP).masked(&Settled::C, &Settled::C));
                    let address = cas_with::<Settled>(Mode::Le, at, TMP);
                    chain.then(address.masked(&Settled::NONE, &Settled::ADDRESS).reclaiming(ADDRESS_OFFSET));
                    continue;
                }
                let install = cas_with::<Settled>(Mode::Lt, at, TMP);
                chain.then(install.masked(&Settled::C, &Settled::WHOLE).reclaiming(ADDRESS_OFFSET));
            }
            if let Some(entry) = decides.filter(|_| is_late) {
                word = Some(chain.also(decide(entry)));
            }
            match once(&*self.fabric, shard.node, &chain, &mut own.reply).await {
                Ok(true) => tries = 0,
                // What is decided must become visible, and a full store must be emptied: take larger buffers.
                Ok(false) if (is_decided || has_run || is_delete) && !is_last_try => {
                    tries += 1;
                    continue;
                }
                Ok(false) => {
                    let pause = pauses.next().ok_or((has_run, TxnError::OutOfMemory))?;
                    self.fabric.sleep(pause).await;
                    tries = 0;
                    continue;
                }
                Err(error) => return Err((has_run || error.ran() != Ran::No, TxnError::of_read(error))),
            }
            match own.reply.verdict() {
                Status::Ok => {}
                status => return Err((true, TxnError::Refused(status))),
            }
            if let Some(word) = word
                && own.reply.status(word) != Status::Ok
                && own.reply.get(word) != Ok(&decided)
            {
                return Err((true, TxnError::Damaged("a log entry was changed by another client")));
            }
            (left, has_run) = (later, true);
        }
        Ok(())
    }
}

/// Number of chains that install these items.
pub(super) fn chains_of(writes: &[Write<'_>]) -> usize {
    let (mut left, mut chains) = (writes, 0);
    while !left.is_empty() {
        (left, chains) = (&left[fitting(left)..], chains + 1);
    }
    chains
}

/// Number of the first items that one chain installs.
fn fitting(writes: &[Write<'_>]) -> usize {
    let mut bytes = 0;
    let fits = writes.iter().take(ITEMS_PER_CHAIN).take_while(|write| {
        bytes += Write::len(write.key, write.value);
        bytes <= BYTES_PER_CHAIN
    });
    fits.count().max(1)
}

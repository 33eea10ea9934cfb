//! Commit: at each shard, the word becomes DECIDED, and then the new items are installed, in one chain.
//!
//! ```text
//! CAS word: ACTIVE -> DECIDED; WRITE scratch: TS
//! per key:  ALLOCATE item, its address to scratch; then CAS(LT, C, TS), swaps C and the address
//! ```
//!
//! An install that does not swap is still a commit: a later transaction has overwritten the value. The chain then
//! retires the new item. A chain whose outcome is unknown is repeated over the next session.
//!
//! Invariant: the client reports success once all shards have answered.
//! Invariant: the installs of a shard follow DECIDED at this shard.

use super::Client;
use super::execute::{TMP, TMP_ADDRESS};
use super::layout::{ADDRESS_OFFSET, HEADER_SIZE, ItemHeader, Settled, State, Timestamp, Word};
use super::transaction::{KeyOf, Lane, LaneShard, Part, of_parts};
use crate::members::all;
use crate::ready::run_until_ready;
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

/// Outcome of the commit of a shard.
#[derive(Debug)]
enum Installed {
    Yes,
    /// A chain has run, or may have run, and another has failed.
    Partly(TxnError),
    /// No chain has run.
    No(TxnError),
}

impl<F: Fabric + Clock> Client<F> {
    /// Commits a prepared transaction.
    ///
    /// # Errors
    /// [`TxnError`]; if no shard has got DECIDED, the transaction is aborted.
    pub(super) async fn commit(
        &self,
        lane: &mut Lane,
        parts: &[Part<'_>],
        ts: Timestamp,
    ) -> Result<Committed, TxnError> {
        let outcomes = self.install_all(lane, parts, ts).await;
        if let Some(Installed::No(error)) =
            outcomes.iter().find(|outcome| matches!(outcome, Installed::No(_)))
            && outcomes.iter().all(|outcome| matches!(outcome, Installed::No(_)))
        {
            let error = error.clone();
            self.abort(lane, parts, ts).await;
            return Err(error);
        }
        match outcomes.into_iter().find(|outcome| !matches!(outcome, Installed::Yes)) {
            None => Ok(Committed { version: Some(Version(ts.bits())) }),
            Some(Installed::No(error) | Installed::Partly(error)) => {
                self.session.give_up();
                Err(TxnError::Unknown(Box::new(error)))
            }
            Some(Installed::Yes) => unreachable!("it was filtered"),
        }
    }

    async fn install_all(&self, lane: &mut Lane, parts: &[Part<'_>], ts: Timestamp) -> Vec<Installed> {
        let Lane { number, shards } = lane;
        let written = || parts.iter().filter(|part| part.has_writes());
        let of = of_parts(shards, written().map(|part| part.shard));
        all(of.into_iter().zip(written()).map(|(own, part)| self.install(*number, own, part, ts))).await
    }

    async fn install(&self, lane: u16, own: &mut LaneShard, part: &Part<'_>, ts: Timestamp) -> Installed {
        let (shard, at) = (&self.session.shards[part.shard], self.session.entry(lane));
        let (active, decided) = (Word::new(ts, State::Active), Word::new(ts, State::Decided));
        let written: Vec<&KeyOf<'_>> = part.keys.iter().filter(|key| key.write.is_some()).collect();
        let (mut left, mut is_first) = (&written[..], true);
        while !left.is_empty() {
            let failed = |error| if is_first { Installed::No(error) } else { Installed::Partly(error) };
            let (now, later) = left.split_at(fitting(left));
            let header = |key: &&KeyOf<'_>| ItemHeader::new(ts, key.key, key.write.flatten());
            let headers: Vec<ItemHeader<Timestamp>> = now.iter().map(header).collect();
            let mut chain = own.buffer.begin(shard.key());
            let word = is_first.then(|| chain.also(cas(Mode::Eq, shard.word(at), &active, &decided)));
            chain.also(write(TMP, ts.as_bytes()));
            for (key, header) in now.iter().zip(&headers) {
                let value = key.write.flatten().unwrap_or_default();
                let class = Class::for_len(HEADER_SIZE + key.key.len() + value.len()).expect("a short item");
                let item = allocate(class.list(), [header.as_bytes(), key.key, value]);
                let is_delete = key.write == Some(None);
                let item = if is_delete { item.from_reserve() } else { item };
                chain.also(item.redirect(TMP_ADDRESS));
                let install = cas_with::<Settled>(Mode::Lt, shard.settled(key.slot), TMP);
                chain.then(install.masked(&Settled::C, &Settled::WHOLE).reclaiming(ADDRESS_OFFSET));
            }
            match run_until_ready(&*self.session.fabric, shard.node, &chain, &mut own.reply).await {
                Ok(true) => {}
                Ok(false) => return failed(TxnError::OutOfMemory),
                Err(error) if error.ran() == Ran::No => return failed(TxnError::of_read(error)),
                Err(error) => return Installed::Partly(TxnError::Fabric(error)),
            }
            let verdict = own.reply.verdict();
            if verdict != Status::Ok {
                return Installed::Partly(TxnError::Refused(verdict));
            }
            if let Some(word) = word
                && own.reply.status(word) != Status::Ok
                && own.reply.get(word) != Ok(&decided)
            {
                return Installed::Partly(TxnError::Damaged("a log entry was changed by another client"));
            }
            own.word = Some(decided);
            (left, is_first) = (later, false);
        }
        Installed::Yes
    }
}

/// Number of the first items that one chain installs.
fn fitting(keys: &[&KeyOf<'_>]) -> usize {
    let mut bytes = 0;
    let len = |key: &&KeyOf<'_>| HEADER_SIZE + key.key.len() + key.write.flatten().map_or(0, <[u8]>::len);
    let fits = keys.iter().take(ITEMS_PER_CHAIN).take_while(|key| {
        bytes += len(key);
        bytes <= BYTES_PER_CHAIN
    });
    fits.count().max(1)
}

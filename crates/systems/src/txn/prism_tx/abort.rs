//! Abort: raises C of each key whose PW the transaction has raised, once the PW that it has replaced is settled. Then
//! frees the entries.
//!
//! ```text
//! per key: CAS(GE, C, replaced PW), swaps nothing; then CAS(LT, C, TS), swaps C
//! ```
//!
//! Waits point to smaller timestamps, so they make no cycle.
//!
//! Invariant: C of a key is raised only once all transactions up to the replaced PW are settled there. Else it would
//! hide their values.

use super::Client;
use super::layout::{EntryId, Settled, State, Timestamp, Word};
use super::transaction::{Lane, LaneShard, Part, of_parts};
use crate::members::all;
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::{Fabric, Mode, Status, cas, read_as};
use std::time::Duration;

/// Pauses between two looks at a key whose replaced PW is not settled.
const PAUSE_FIRST: Duration = Duration::from_micros(5);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Number of keys that one chain settles, with two ops each.
const KEYS_PER_CHAIN: usize = 32;

impl<F: Fabric + Clock> Client<F> {
    /// Settles all keys of a transaction that does not commit, and frees its entries. If this fails, the client gives
    /// up: the intents stay, and others settle the keys.
    pub(super) async fn abort(&self, lane: &mut Lane, parts: &[Part<'_>], ts: Timestamp) {
        let Lane { number, shards } = lane;
        let entry = self.session.entry(*number);
        let of = of_parts(shards, parts.iter().map(|part| part.shard));
        let raised = all(of.into_iter().zip(parts).map(|(own, part)| self.raise_all(own, part, ts))).await;
        if raised.iter().any(Result::is_err) {
            return self.session.give_up();
        }
        let active = Word::new(ts, State::Active);
        let entries = shards.iter_mut().enumerate().filter(|(_, own)| own.word == Some(active));
        all(entries.map(|(shard, own)| self.clear(shard, own, entry, active))).await;
    }

    async fn raise_all(&self, own: &mut LaneShard, part: &Part<'_>, ts: Timestamp) -> Result<(), TxnError> {
        let shard = &self.session.shards[part.shard];
        let raised = part.keys.iter().filter_map(|key| Some((key.slot, key.replaced?)));
        let mut left: Vec<(u64, Timestamp)> = raised.collect();
        let (mut pause, to) = (PAUSE_FIRST, Settled::at_time(ts));
        while !left.is_empty() {
            let mut waiting = Vec::new();
            for keys in left.chunks(KEYS_PER_CHAIN) {
                let replaced: Vec<Settled> = keys.iter().map(|(_, pw)| Settled::at_time(*pw)).collect();
                let mut chain = own.buffer.begin(shard.key());
                let mut outs = Vec::with_capacity(keys.len());
                for ((slot, _), replaced) in keys.iter().zip(&replaced) {
                    let at = shard.settled(*slot);
                    let is_settled =
                        cas(Mode::Ge, at, replaced, replaced).masked(&Settled::C, &Settled::NONE);
                    outs.push(chain.also(is_settled));
                    chain.then(cas(Mode::Lt, at, &to, &to).masked(&Settled::C, &Settled::C));
                }
                let ran = self.session.fabric.run(shard.node, &chain, &mut own.reply).await;
                ran.map_err(TxnError::of_read)?;
                for (key, out) in keys.iter().zip(outs) {
                    match own.reply.status(out) {
                        Status::Ok => {}
                        Status::CasFailed => waiting.push(*key),
                        status => return Err(TxnError::Refused(status)),
                    }
                }
            }
            left = waiting;
            if !left.is_empty() {
                self.counters.waits.add();
                left.iter().for_each(|(_, replaced)| self.suspect(*replaced));
                self.session.fabric.sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
                if self.session.is_given_up() {
                    return Err(TxnError::Lost);
                }
            }
        }
        Ok(())
    }

    /// Frees an entry that has this word. Its transaction is finished at all shards.
    pub(super) async fn clear(
        &self,
        shard: usize,
        own: &mut LaneShard,
        entry: EntryId,
        word: Word,
    ) -> Result<(), TxnError> {
        let shard = &self.session.shards[shard];
        own.word = None;
        let mut chain = own.buffer.begin(shard.key());
        let freed = chain.also(cas(Mode::Eq, shard.word(entry), &word, &Word::FREE));
        self.session.fabric.run(shard.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
        match own.reply.status(freed) {
            Status::Ok => {
                own.word = Some(Word::FREE);
                Ok(())
            }
            Status::CasFailed => Err(TxnError::Damaged("a log entry was changed by another client")),
            status => Err(TxnError::Refused(status)),
        }
    }

    /// Reads the word of an entry.
    pub(super) async fn read_word(
        &self,
        shard: usize,
        own: &mut LaneShard,
        entry: EntryId,
    ) -> Result<Word, TxnError> {
        let shard = &self.session.shards[shard];
        let mut chain = own.buffer.begin(shard.key());
        let word = chain.also(read_as::<Word>(shard.word(entry)));
        self.session.fabric.run(shard.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
        own.reply.get(word).copied().map_err(TxnError::Refused)
    }
}

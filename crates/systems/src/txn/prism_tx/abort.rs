//! Abort: raises C of each key whose PW the transaction has raised, once the PW that it has replaced is settled. Then
//! frees the entries.
//!
//! ```text
//! per key: CAS(GE, C, replaced PW), swaps nothing; then CAS(LT, C, TS), swaps C
//! ```
//!
//! Waits point to smaller timestamps, so they make no cycle. If a prepare has no response, the client waits until its
//! chain can run no more, looks for its intent, and settles the keys as a recoverer does.
//!
//! Invariant: C of a key is raised only once all transactions up to the replaced PW are settled there. Else it would
//! hide their values.

use super::layout::{EntryId, Settled, State, Timestamp, Word};
use super::recover::Stop;
use super::site::Buffers;
use super::transaction::{Lane, LaneShard, Part, of_parts};
use super::{Client, PATIENCE, mutants};
use crate::members::all;
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::{Fabric, Mode, Status, cas, write};
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Pauses between two looks at a key whose replaced PW is not settled.
const PAUSE_FIRST: Duration = Duration::from_micros(5);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Number of leases for which an abort waits, beyond [`PATIENCE`]. A transaction that is in the way for so long is that
/// of a dead client that nobody can recover now.
const WAIT_LEASES: u32 = 10;
/// Number of keys that one chain settles, with two ops each.
const KEYS_PER_CHAIN: usize = 32;

impl<F: Fabric + Clock> Client<F> {
    /// Settles all keys of a transaction that does not commit, and frees its entries. If this fails, the client gives
    /// up: the intents stay, and others settle the keys.
    pub(super) async fn abort(&self, lane: &mut Lane, parts: &[Part<'_>], ts: Timestamp) {
        let entry = self.session.entry(lane.number);
        let of = of_parts(&mut lane.shards, parts.iter().map(|part| part.shard));
        let settled = of.into_iter().zip(parts).map(|(own, part)| self.settle(own, part, entry, ts));
        if all(settled).await.iter().any(Result::is_err) {
            return self.leave(lane);
        }
        let active = Word::new(ts, State::Active);
        let entries = lane.shards.iter_mut().enumerate().filter(|(_, own)| own.word == Some(active));
        all(entries.map(|(shard, own)| self.clear(shard, own, entry, active))).await;
    }

    /// Leaves a transaction to the recoverers of this client.
    pub(super) fn leave(&self, lane: &mut Lane) {
        self.session.give_up();
        lane.shards.iter_mut().for_each(|own| own.word = None);
    }

    /// Settles the keys of a part.
    async fn settle(
        &self,
        own: &mut LaneShard,
        part: &Part<'_>,
        entry: EntryId,
        ts: Timestamp,
    ) -> Result<(), TxnError> {
        let goes_on = || !self.session.is_given_up();
        let Some(unknown) = part.unknown else {
            let raise = async || self.raise_all(own, part, ts).await;
            return self.site.persist(PATIENCE, goes_on, raise).await;
        };
        if !part.has_writes() || mutants::UNKNOWN_FORGOTTEN.is_on() {
            return Ok(()); // It may have raised PRs, which need nothing.
        }
        let patience = PATIENCE.max(2 * self.session.joined.silence);
        self.site.end_session(part.shard, unknown, self.session.joined.silence, (patience, goes_on)).await?;
        let find = async || self.site.read_word(part.shard, entry, &mut own.buffers).await;
        let word = self.site.persist(PATIENCE, goes_on, find).await?;
        own.word = Some(word);
        if word != Word::new(ts, State::Active) {
            return Ok(()); // The chain has not run, or has raised no PW.
        }
        let slots: Vec<u64> = part.writes().iter().map(|write| write.slot).collect();
        let waiting = async |other: EntryId| {
            self.session.suspect(Some(other.client));
            if goes_on() { Ok(()) } else { Err(Stop::Error(TxnError::Lost)) }
        };
        let back_out = async || {
            self.site.back_out(part.shard, entry, ts, &slots, waiting).await.map_err(|stop| match stop {
                Stop::Error(error) => error,
                Stop::Blocked(_) => TxnError::Lost,
            })
        };
        self.site.persist(PATIENCE, goes_on, back_out).await
    }

    async fn raise_all(&self, own: &mut LaneShard, part: &Part<'_>, ts: Timestamp) -> Result<(), TxnError> {
        let shard = &self.site.shards[part.shard];
        let Buffers { chain: buffer, reply } = &mut own.buffers;
        let is_published = mutants::ABORT_AS_PUBLISHED.is_on();
        let (at_once, if_passed) = (
            is_published || mutants::RAISED_AT_ONCE.is_on(),
            is_published || mutants::RAISED_IF_PASSED.is_on(),
        );
        let raised = part.keys.iter().filter(|key| key.has_passed || !if_passed);
        let raised = raised.filter_map(|key| Some((key.slot, key.replaced?)));
        let waits = |(slot, replaced)| (slot, if at_once { Timestamp::ZERO } else { replaced });
        let mut left: Vec<(u64, Timestamp)> = raised.map(waits).collect();
        let (mut pause, to) = (PAUSE_FIRST, Settled::at_time(ts));
        let until = self.site.fabric.now() + WAIT_LEASES * self.site.lease() + PATIENCE;
        while !left.is_empty() {
            let mut waiting = Vec::new();
            for keys in left.chunks(KEYS_PER_CHAIN) {
                let replaced: Vec<Settled> = keys.iter().map(|(_, pw)| Settled::at_time(*pw)).collect();
                let mut chain = buffer.begin(shard.key());
                let mut outs = Vec::with_capacity(keys.len());
                for ((slot, _), replaced) in keys.iter().zip(&replaced) {
                    let at = shard.settled(*slot);
                    let is_settled =
                        cas(Mode::Ge, at, replaced, replaced).masked(&Settled::C, &Settled::NONE);
                    outs.push(chain.also(is_settled));
                    chain.then(cas(Mode::Lt, at, &to, &to).masked(&Settled::C, &Settled::C));
                }
                self.site.fabric.run(shard.node, &chain, reply).await.map_err(TxnError::of_read)?;
                for (key, out) in keys.iter().zip(outs) {
                    match reply.status(out) {
                        Status::Ok => {}
                        Status::CasFailed => waiting.push(*key),
                        status => return Err(TxnError::Refused(status)),
                    }
                }
            }
            left = waiting;
            if !left.is_empty() {
                self.counters.waits.add();
                left.iter().for_each(|(_, replaced)| self.session.suspect(replaced.id()));
                self.site.fabric.sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
                if self.session.is_given_up() || self.site.fabric.now() > until {
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
        own.word = None;
        if mutants::UNAWAITED_CLEAR.is_on() {
            let table = &self.site.shards[shard];
            let Buffers { chain: buffer, reply } = &mut own.buffers;
            let mut chain = buffer.begin(table.key());
            chain.also(write(table.word(entry), Word::FREE.as_bytes()));
            let mut posted = pin!(self.site.fabric.run(table.node, &chain, reply));
            let _unawaited = poll_fn(|cx| Poll::Ready(posted.as_mut().poll(cx))).await;
            own.word = Some(Word::FREE);
            return Ok(());
        }
        let freed = self.site.change_word(shard, entry, (word, Word::FREE), &mut own.buffers).await?;
        if freed != word {
            return Err(TxnError::Damaged("a log entry was changed by another client"));
        }
        own.word = Some(Word::FREE);
        Ok(())
    }
}

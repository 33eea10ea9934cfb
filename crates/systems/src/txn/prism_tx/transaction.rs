//! The phases of a transaction after its execution: slots for all keys, timestamp, prepare, decision, commit or abort.
//!
//! Invariant: the next transaction of a lane begins once the one before is finished at all shards. Its first chain at a
//! shard frees the entry of the one before.

use super::commit::chains_of;
use super::execute::{Place, Seen, Wanted};
use super::layout::{Timestamp, Word, Write, encode_body};
use super::prepare::{Answer, Checks};
use super::site::Buffers;
use super::{Client, Done, Job, mutants};
use crate::members::{all, wait_for};
use crate::txn::{Committed, Prepare, TxnError};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::collections::BTreeMap;
use std::time::Duration;

/// A transaction that has been executed.
pub(super) struct Transaction {
    pub(super) reads: BTreeMap<Vec<u8>, Box<Seen>>,
    /// The written keys, with their new values; `None` for a key that is deleted.
    pub(super) writes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    /// Time in microseconds above which the timestamp lies.
    pub(super) above: u64,
}

/// A key of a transaction at a shard.
pub(super) struct KeyOf<'t> {
    /// Index of the key's slot.
    pub(super) slot: u64,
    pub(super) key: &'t [u8],
    /// RC of the key, if the transaction has read it.
    pub(super) read: Option<Timestamp>,
    /// The new value, if the transaction writes the key; the inner option is empty if it deletes the key.
    pub(super) write: Option<Option<&'t [u8]>>,
    /// The PW that the prepare has replaced, if it has raised PW.
    pub(super) replaced: Option<Timestamp>,
    /// Whether the check of the write has passed.
    pub(super) has_passed: bool,
}

/// The part of a transaction at one shard.
pub(super) struct Part<'t> {
    /// Index of the member.
    pub(super) shard: usize,
    /// The keys, in the order of their slots.
    pub(super) keys: Vec<KeyOf<'t>>,
    /// Body of the intent.
    pub(super) body: Vec<u8>,
    /// Whether several chains install what the transaction writes, so that its prepare finds out whether each of them
    /// will have memory.
    pub(super) needs_several: bool,
    /// If a chain of the prepare may have run or may yet run, the number of its session, and when the client learned
    /// that.
    pub(super) unknown: Option<(u64, Duration)>,
}

impl Part<'_> {
    pub(super) fn has_writes(&self) -> bool {
        self.keys.iter().any(|key| key.write.is_some())
    }

    /// The writes, in the order of their slots.
    pub(super) fn writes(&self) -> Vec<Write<'_>> {
        let written = self.keys.iter().filter_map(|key| Some((key, key.write?)));
        written.map(|(key, value)| Write { slot: key.slot, key: key.key, value }).collect()
    }

    fn encode(&mut self, ts: Timestamp) {
        let mut body = Vec::new();
        encode_body(ts, self.writes().iter().copied(), &mut body);
        self.body = body;
    }
}

/// What a lane keeps for a member.
pub(super) struct LaneShard {
    /// Word of the lane's entry; `None` if the client does not know it. If it is unsettled, its transaction is finished
    /// at all shards, and the entry is yet to be freed.
    pub(super) word: Option<Word>,
    pub(super) buffers: Buffers,
}

/// State of a lane, which carries out one transaction at a time.
#[derive(Default)]
pub(super) struct Lane {
    pub(super) number: u16,
    /// By member. Empty while a transaction has them.
    pub(super) shards: Vec<LaneShard>,
}

impl Lane {
    pub(super) fn new(number: u16, words: impl Iterator<Item = Word>) -> Lane {
        let shard = |word| LaneShard { word: Some(word), buffers: Buffers::default() };
        Lane { number, shards: words.map(shard).collect() }
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Carries out a job on a lane.
    pub(super) async fn perform(&self, lane: usize, job: Job) -> Done {
        let mut own = self.lanes[lane].take();
        let Job::Commit(transaction) = job else {
            self.clear_lane(&mut own).await;
            self.lanes[lane].replace(own);
            return (Ok(Committed { version: None }), 0);
        };
        let mut above = transaction.above;
        let done = self.run(&mut own, transaction, &mut above).await;
        match &done {
            Ok(_) => self.counters.commits.add(),
            Err(_) => self.counters.aborts.add(),
        }
        self.lanes[lane].replace(own);
        (done, above)
    }

    async fn run(
        &self,
        lane: &mut Lane,
        transaction: Transaction,
        above: &mut u64,
    ) -> Result<Committed, TxnError> {
        if self.session.is_given_up() {
            return Err(TxnError::Lost);
        }
        self.site.fetch_keys().await?;
        let places = self.places(&transaction, above).await?;
        let ts = self.session.timestamp(*above).await?;
        let mut parts = self.parts(&transaction, &places);
        parts.iter_mut().filter(|part| part.has_writes()).for_each(|part| part.encode(ts));
        let rounds: &[Checks] = match self.site.shards[0].spec().prepare {
            Prepare::Together => &[Checks::All],
            Prepare::Paper => &[Checks::Reads, Checks::Writes],
        };
        for round in rounds {
            let answers = self.prepare_all(lane, &mut parts, ts, *round).await;
            if answers.iter().all(Answer::has_passed) {
                continue;
            }
            let blocker = answers.iter().filter_map(|answer| answer.blocker).max();
            if let Some(blocker) = blocker {
                self.session.suspect(blocker.id());
                *above = (*above).max(blocker.clock());
            }
            self.abort(lane, &parts, ts).await;
            let error = answers.into_iter().find_map(|answer| answer.error);
            return Err(error.unwrap_or(TxnError::Conflict));
        }
        self.site.await_clock(ts).await;
        match parts.iter().any(Part::has_writes) {
            true => self.commit(lane, &parts, ts).await,
            false => Ok(Committed { version: None }),
        }
    }

    /// Returns a slot for each key of a transaction. Claims slots for keys that have none. Raises `above` to the
    /// timestamps that bind the transaction.
    async fn places<'t>(
        &self,
        transaction: &'t Transaction,
        above: &mut u64,
    ) -> Result<BTreeMap<&'t [u8], Place>, TxnError> {
        let unread = transaction.writes.keys().filter(|key| !transaction.reads.contains_key(*key));
        let unread: Vec<&[u8]> = unread.map(Vec::as_slice).collect();
        let found = match unread.is_empty() {
            true => Vec::new(),
            false => self.look_up(&unread, Wanted::Any).await?,
        };
        let read = transaction.reads.iter().map(|(key, seen)| (key.as_slice(), &**seen));
        let (mut places, mut unclaimed) = (BTreeMap::new(), Vec::new());
        for (key, seen) in read.chain(unread.into_iter().zip(&found)) {
            *above = (*above).max(seen.version.clock()).max(seen.prepared.clock());
            match seen.has_slot {
                true => _ = places.insert(key, seen.place),
                false => unclaimed.push(key),
            }
        }
        for (key, claimed) in unclaimed.iter().zip(all(unclaimed.iter().map(|key| self.claim(key))).await) {
            let seen = claimed?;
            *above = (*above).max(seen.prepared.clock());
            places.insert(key, seen.place);
        }
        Ok(places)
    }

    /// Divides a transaction among the shards.
    fn parts<'t>(&self, transaction: &'t Transaction, places: &BTreeMap<&[u8], Place>) -> Vec<Part<'t>> {
        let mut parts: Vec<Part<'t>> = (0..self.site.shards.len())
            .map(|shard| Part {
                shard,
                keys: Vec::new(),
                body: Vec::new(),
                needs_several: false,
                unknown: None,
            })
            .collect();
        let unread = transaction.writes.keys().filter(|key| !transaction.reads.contains_key(*key));
        for key in transaction.reads.keys().chain(unread) {
            let Place { shard, slot } = places[key.as_slice()];
            parts[shard].keys.push(KeyOf {
                slot,
                key,
                read: transaction.reads.get(key).map(|seen| seen.version),
                write: transaction.writes.get(key).map(|value| value.as_deref()),
                replaced: None,
                has_passed: false,
            });
        }
        parts.retain(|part| !part.keys.is_empty());
        parts.iter_mut().for_each(|part| part.keys.sort_unstable_by_key(|key| key.slot));
        let chains: usize = parts.iter().map(|part| chains_of(&part.writes())).sum();
        parts.iter_mut().for_each(|part| part.needs_several = chains > 1);
        parts
    }

    /// Makes the checks of a round at all shards. Waits for all answers: a chain that is dropped may run later.
    async fn prepare_all(
        &self,
        lane: &mut Lane,
        parts: &mut [Part<'_>],
        ts: Timestamp,
        checks: Checks,
    ) -> Vec<Answer> {
        let Lane { number, shards } = lane;
        let of = of_parts(shards, parts.iter().map(|part| part.shard));
        let chains = of.into_iter().zip(parts);
        let chains = chains.map(|(own, part)| self.prepare(*number, own, part, ts, checks));
        let is_dropped = |answers: &[Option<Answer>]| {
            mutants::PREPARE_DROPPED.is_on() && answers.iter().flatten().any(|answer| !answer.has_passed())
        };
        wait_for(chains, is_dropped).await.into_iter().map(Option::unwrap_or_default).collect()
    }

    /// Frees the entries of a lane, whose transactions are finished. Returns whether all are free.
    async fn clear_lane(&self, lane: &mut Lane) -> bool {
        let entry = self.session.entry(lane.number);
        if self.session.is_given_up() || self.site.fetch_keys().await.is_err() {
            return false;
        }
        let clears = lane.shards.iter_mut().enumerate().map(|(shard, own)| async move {
            match own.word {
                Some(word) if word.is_unsettled() => self.clear(shard, own, entry, word).await.is_ok(),
                Some(_) => true,
                None => false,
            }
        });
        all(clears).await.into_iter().all(|is_free| is_free)
    }

    /// Frees the entries of lanes without a job from time to time: recoverers of other clients may wait for it.
    pub(super) async fn keep_sweeping(&self) {
        loop {
            self.site.fabric.sleep(self.site.lease() / 4).await;
            for (number, lane) in self.lanes.iter().enumerate() {
                let is_due = |own: &LaneShard| own.word.is_some_and(Word::is_unsettled);
                if lane.borrow().shards.iter().any(is_due) {
                    let _else_the_lane_is_used = self.desk.jobs.carry_out_on(number, Job::Clear).await;
                }
            }
        }
    }

    /// Frees the entries of all lanes. The client has no job. If an entry is not freed, the client gives up: a
    /// recoverer frees it once the lease has expired.
    pub(super) async fn clear_all(&self) {
        for lane in &self.lanes {
            let mut own = lane.take();
            if !self.clear_lane(&mut own).await {
                self.session.give_up();
            }
            lane.replace(own);
        }
    }
}

/// Returns what a lane keeps for these members, which are in ascending order.
pub(super) fn of_parts(
    shards: &mut [LaneShard],
    members: impl Iterator<Item = usize>,
) -> Vec<&mut LaneShard> {
    let mut members = members.peekable();
    let of = shards.iter_mut().enumerate();
    of.filter_map(|(shard, own)| members.next_if_eq(&shard).map(|_| own)).collect()
}

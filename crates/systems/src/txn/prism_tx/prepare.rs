//! Prepare: at each shard, the intent and then the checks of reads and writes, in one chain.
//!
//! ```text
//! CAS word: former -> free; then WRITE body; then CAS word: free -> ACTIVE     if the transaction writes at the shard
//! per key:  CAS(LT, PW|PR, RC|TS), swaps PR                                     if it is read
//!           then CAS(LT, PW, TS), swaps PW                                      if it is written
//! CAS word: never -> never; then per value: ALLOCATE                            if several chains install the items
//! ```
//!
//! The last CAS fails, so that its ALLOCATEs are skipped: the node takes a buffer for each before the first op, and
//! gives it back. So a transaction of several members is refused before it is decided if one of them is full. Other
//! transactions may take the buffers before the commit: `commit` says what follows.
//!
//! The write check passes if PW was raised and TS >= the PR that the same CAS has returned: a later reader of the old
//! version finds the new PW. A transaction that reads and writes the key has set PR to TS itself, so equality passes.
//!
//! Invariant: the intent is in the log before the first PW of the shard is raised.
//! Invariant: a body is written only after the word of the entry is known to be free, or DONE by a former holder.

use super::commit::class_of;
use super::layout::{Prepared, State, Timestamp, Word};
use super::site::Buffers;
use super::transaction::{KeyOf, LaneShard, Part};
use super::{Client, mutants};
use crate::ready::{once, pauses};
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, Mode, Out, Status, allocate, cas, write};
use zerocopy::IntoBytes;

/// Number of keys that one chain checks, with two ops each, beside the ops of the intent.
const KEYS_PER_CHAIN: usize = 28;
/// The same for a chain that also finds out whether the member has memory, by one op more for each key.
const KEYS_PER_PROBE: usize = 16;

/// Checks of a prepare that one round makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checks {
    All,
    Reads,
    Writes,
}

impl Checks {
    fn has_reads(self) -> bool {
        self != Checks::Writes
    }

    fn has_writes(self) -> bool {
        self != Checks::Reads
    }
}

/// What the prepare of a shard has found.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// The highest timestamp that has failed a check.
    pub(super) blocker: Option<Timestamp>,
    /// Why the chains were not answered, or not carried out.
    pub(super) error: Option<TxnError>,
}

impl Answer {
    fn of(error: TxnError) -> Answer {
        Answer { error: Some(error), ..Answer::default() }
    }

    /// Whether all checks have passed.
    pub(super) fn has_passed(&self) -> bool {
        self.blocker.is_none() && self.error.is_none()
    }

    fn fail(&mut self, blocker: Timestamp) {
        self.blocker = Some(self.blocker.map_or(blocker, |other| other.max(blocker)));
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Prepares at a shard. Notes in `part` which PWs were raised, and from what.
    pub(super) async fn prepare(
        &self,
        lane: u16,
        own: &mut LaneShard,
        part: &mut Part<'_>,
        ts: Timestamp,
        checks: Checks,
    ) -> Answer {
        let (shard, entry) = (&self.site.shards[part.shard], self.session.entry(lane));
        let is_checked = |key: &&mut KeyOf<'_>| {
            checks.has_reads() && key.read.is_some() || checks.has_writes() && key.write.is_some()
        };
        let has_intent = checks.has_writes() && part.has_writes();
        let former = match own.word {
            Some(word) => word,
            None if has_intent => match self.site.read_word(part.shard, entry, &mut own.buffers).await {
                Ok(word) => word,
                Err(error) => return Answer::of(error),
            },
            None => Word::FREE,
        };
        let active = Word::new(ts, State::Active);
        let is_former = former.is_unsettled();
        let unused = match is_former && !mutants::BODY_BEFORE_CLEAR.is_on() {
            true => Word::FREE,
            false => former,
        };
        let Buffers { chain: buffer, reply } = &mut own.buffers;
        let mut keys: Vec<_> = part.keys.iter_mut().filter(is_checked).collect();
        let mut answer = Answer::default();
        let probes = part.needs_several && checks.has_writes();
        let most = if probes { KEYS_PER_PROBE } else { KEYS_PER_CHAIN };
        for (number, keys) in keys.chunks_mut(most).enumerate() {
            let operands: Vec<(Prepared, Prepared)> = keys
                .iter()
                .map(|key| {
                    let read = Prepared { pw: key.read.unwrap_or_default(), pr: ts };
                    (read, Prepared { pw: ts, pr: Timestamp::ZERO })
                })
                .collect();
            let mut chain = buffer.begin(shard.key());
            let mut activated = None;
            if has_intent && number == 0 {
                let at = shard.word(entry);
                if is_former && mutants::BODY_BEFORE_CLEAR.is_on() {
                    chain.also(write(shard.body(entry), &part.body));
                } else if is_former {
                    chain.also(cas(Mode::Eq, at, &former, &Word::FREE));
                    chain.then(write(shard.body(entry), &part.body));
                } else {
                    chain.also(write(shard.body(entry), &part.body));
                }
                activated = match mutants::UNAWAITED_CLEAR.is_on() {
                    false => Some(chain.then(cas(Mode::Eq, at, &unused, &active))),
                    true => {
                        chain.then(write(at, active.as_bytes()));
                        None
                    }
                };
            }
            let mut outs: Vec<[Option<Out<Prepared>>; 2]> = Vec::with_capacity(keys.len());
            for (key, (read, written)) in keys.iter().zip(&operands) {
                let at = shard.slot(key.slot);
                let is_read = key.read.is_some() && checks.has_reads();
                let is_written = key.write.is_some() && checks.has_writes();
                let checked = is_read.then(|| {
                    chain.also(cas(Mode::Lt, at, read, read).masked(&Prepared::WHOLE, &Prepared::PR))
                });
                let raise = cas(Mode::Lt, at, written, written).masked(&Prepared::PW, &Prepared::PW);
                let watched = (is_written && mutants::READERS_BEFORE_RAISE.is_on()).then(|| {
                    let watch = cas(Mode::Le, at, read, read).masked(&Prepared::PR, &Prepared::NONE);
                    if is_read { chain.then(watch) } else { chain.also(watch) }
                });
                let is_conditional = is_read || watched.is_some();
                let raised =
                    is_written.then(|| if is_conditional { chain.then(raise) } else { chain.also(raise) });
                outs.push([checked, raised]);
            }
            if probes {
                chain.also(cas(Mode::Eq, shard.word(entry), &Word::NEVER, &Word::NEVER));
                for (key, value) in keys.iter().filter_map(|key| Some((key.key, key.write.flatten()?))) {
                    chain.then(allocate(class_of(key, Some(value)).list(), [&[], &[], &[]]));
                }
            }
            let mut pauses = pauses();
            loop {
                let session = self.site.fabric.session_number(shard.node);
                match once(&*self.site.fabric, shard.node, &chain, reply).await {
                    Ok(true) => break,
                    Ok(false) => match pauses.next() {
                        Some(pause) => self.site.fabric.sleep(pause).await,
                        None => return Answer { error: Some(TxnError::OutOfMemory), ..answer },
                    },
                    Err(error) => {
                        if error.ran() != Ran::No {
                            part.unknown = Some((session, self.site.fabric.now()));
                            own.word = own.word.filter(|_| !has_intent);
                        }
                        return Answer::of(TxnError::of_read(error));
                    }
                }
            }
            match activated.map(|activated| reply.status(activated)) {
                // With the mutant, the word was written.
                None if has_intent && number == 0 => own.word = Some(active),
                None => {}
                Some(Status::Ok) => own.word = Some(active),
                Some(Status::CasFailed | Status::Skipped) => {
                    answer.error = Some(TxnError::Damaged("a log entry was changed by another client"));
                }
                Some(status) => return self.refused(part, &mut own.word, status),
            }
            for (key, [checked, raised]) in keys.iter_mut().zip(outs) {
                let mut also_written = true;
                match checked.map(|checked| reply.get(checked)) {
                    None => {}
                    Some(Ok(old)) => {
                        let has_passed = reply.status(checked.expect("it was read")) == Status::Ok;
                        also_written = has_passed;
                        // The key is only read, and PR is TS or later.
                        let is_covered = Some(old.pw) == key.read && key.write.is_none();
                        if !has_passed && !is_covered {
                            answer.fail(old.pw.max(old.pr));
                        }
                    }
                    Some(Err(status)) => return self.refused(part, &mut own.word, status),
                }
                match raised.filter(|_| also_written).map(|raised| (raised, reply.get(raised))) {
                    None => {}
                    Some((_, Err(Status::Skipped))) if mutants::READERS_BEFORE_RAISE.is_on() => {
                        answer.fail(ts)
                    }
                    Some((raised, Ok(old))) => {
                        if reply.status(raised) == Status::Ok {
                            key.replaced = Some(old.pw);
                            key.has_passed = match mutants::STRICT_READERS.is_on() {
                                false => ts >= old.pr || mutants::READERS_BEFORE_RAISE.is_on(),
                                true => ts > old.pr,
                            };
                            if !key.has_passed {
                                answer.fail(old.pr);
                            }
                        } else {
                            answer.fail(old.pw);
                        }
                    }
                    Some((_, Err(status))) => return self.refused(part, &mut own.word, status),
                }
            }
            if !answer.has_passed() {
                break;
            }
        }
        answer
    }

    /// Returns the answer of a shard that has refused an op with this status. The ops before it have run.
    fn refused(&self, part: &mut Part<'_>, word: &mut Option<Word>, status: Status) -> Answer {
        let session = self.site.fabric.session_number(self.site.shards[part.shard].node);
        part.unknown = Some((session, self.site.fabric.now()));
        *word = None;
        Answer::of(TxnError::Refused(status))
    }
}

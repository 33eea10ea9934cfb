//! One operation: its attempts to lock a block at a majority of the replicas, and what an attempt does then.
//!
//! An attempt asks all replicas for the lock at once. Each replica then goes its own way as soon as the *stage* of the
//! attempt permits it: its next request follows from the stage and from what the replica has answered so far
//! ([`Seat::next`]). So a slow replica delays no other one, and a lock that is granted late is freed.
//!
//! Invariant: an attempt ends only when none of its requests is in flight, and when each lock that it holds was freed
//! or is a debt of the replica.
//! Invariant: a block is written only at a replica whose tag was read under the lock that is still held, and is lower.

use super::layout::TAG_SIZE;
use super::replica::{Buffers, Claim, Failure};
use super::{Client, mutants};
use crate::blocks::BlocksError;
use crate::blocks::tag::Tag;
use crate::lease::LockWord;
use crate::members::REPLICAS_MAX;
use crate::store::StoreError;
use crate::system::Backoff;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use farside_remote::fabric::{DEADLINE, Ran};
use std::cell::{Cell, OnceCell, RefCell};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Poll, Waker};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Time after which a replica that cannot be reached counts as failed.
pub(super) const REACH_MAX: Duration = DEADLINE;
/// Time beyond the nodes' silence after which a client that has held a lock all the while counts as dead. A living
/// client releases its locks sooner, or settles its debts.
const HOLDER_MAX: Duration = Duration::from_secs(2);
/// Time after which an operation gives up, however often its locks have changed hands.
const BUSY_MAX: Duration = Duration::from_secs(20);
/// Pauses between attempts, unless the client's options give others.
pub(super) const BACKOFF: Backoff =
    Backoff { first: Duration::from_micros(20), longest: Duration::from_millis(10) };

/// Buffers of an operation, one for each replica.
pub(super) type Lane = [Buffers; REPLICAS_MAX];

/// An operation, which its caller and the client's task share.
#[derive(Default)]
pub(super) struct Operation {
    pub(super) block: u64,
    pub(super) is_write: bool,
    /// Buffer for the content, until it is complete.
    pub(super) buffer: Cell<Vec<u8>>,
    /// Tag and bytes that are written, or that were read.
    pub(super) content: OnceCell<Vec<u8>>,
    outcome: RefCell<Option<Result<(), BlocksError>>>,
    is_answered: Cell<bool>,
    caller: RefCell<Option<Waker>>,
}

impl Operation {
    /// Prepares the operation for another use, with the same buffer. Returns the buffer, which is empty.
    pub(super) fn reset(&mut self, block: u64, is_write: bool) -> Vec<u8> {
        let mut buffer = self.content.take().unwrap_or_else(|| self.buffer.take());
        buffer.clear();
        *self = Operation { block, is_write, ..Operation::default() };
        buffer
    }

    /// Waits for the outcome. The client's task may still be busy with the operation then.
    pub(super) fn poll_outcome(&self, waker: &Waker) -> Poll<Result<(), BlocksError>> {
        if let Some(outcome) = self.outcome.take() {
            return Poll::Ready(outcome);
        }
        match &mut *self.caller.borrow_mut() {
            Some(caller) => caller.clone_from(waker),
            caller => *caller = Some(waker.clone()),
        }
        Poll::Pending
    }

    /// Gives the outcome to the caller, unless it has one.
    fn answer(&self, outcome: Result<(), BlocksError>) {
        if !self.is_answered.replace(true) {
            self.outcome.replace(Some(outcome));
            self.caller.take().into_iter().for_each(Waker::wake);
        }
    }

    fn content(&self) -> &[u8] {
        self.content.get().expect("an operation chooses what it writes before it writes")
    }
}

/// A request of an attempt to one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Lock,
    Read,
    Write,
    WriteAndFree,
    Free,
}

/// What a replica has answered.
enum Answer {
    Locked,
    HeldBy(LockWord),
    Tag(Tag),
    Written,
    WrittenAndFreed,
    Freed,
}

/// Stage of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Fewer than a majority have granted the lock.
    Locking,
    /// A majority has.
    Reading,
    /// A majority was read, and the block is written with this tag.
    Writing(Tag),
    /// A majority has the block, or cannot have it any more: all locks are freed.
    Freeing,
    /// There was no majority, or the caller has gone: all locks are freed, and nothing was written.
    GivenUp,
}

/// One replica in an attempt.
#[derive(Default)]
struct Seat {
    /// The request in flight.
    running: Option<Step>,
    holds: bool,
    /// The tag that was read, under the lock if `holds`.
    tag: Option<Tag>,
    /// Whether the replica has what the operation writes or has read, or a newer block.
    has_content: bool,
    is_freed: bool,
    /// The client that held the lock.
    holder: Option<LockWord>,
    failure: Option<Failure>,
}

impl Seat {
    /// Notes the answer to the request that was in flight.
    fn note(&mut self, answer: Result<Answer, Failure>) {
        self.running = None;
        match answer {
            Ok(Answer::Locked) => self.holds = true,
            Ok(Answer::HeldBy(holder)) => self.holder = Some(holder),
            Ok(Answer::Tag(tag)) => self.tag = Some(tag),
            Ok(Answer::Written) => self.has_content = true,
            Ok(Answer::WrittenAndFreed) => {
                (self.has_content, self.holds, self.is_freed) = (true, false, true);
            }
            Ok(Answer::Freed) => (self.holds, self.is_freed) = (false, true),
            // The lock, if it is held, is a debt.
            Err(failure) => (self.holds, self.failure) = (false, Some(failure)),
        }
    }

    /// The next request, in this stage of the attempt.
    fn next(&self, stage: Stage, frees_apart: bool) -> Option<Step> {
        if self.running.is_some() {
            return None;
        }
        if !self.holds {
            return (stage == Stage::Locking && self.is_read_unlocked()).then_some(Step::Lock);
        }
        match stage {
            Stage::Locking => None,
            Stage::Reading => self.tag.is_none().then_some(Step::Read),
            Stage::Writing(_) if self.has_content => (!frees_apart).then_some(Step::Free),
            Stage::Writing(tag) => {
                let is_lower = self.tag.is_some_and(|read| read < tag);
                match is_lower || self.tag.is_none() && mutants::LATE_GRANT_WRITTEN.is_on() {
                    true if frees_apart => Some(Step::Write),
                    true => Some(Step::WriteAndFree),
                    false => Some(Step::Free),
                }
            }
            Stage::Freeing | Stage::GivenUp => Some(Step::Free),
        }
    }

    /// Whether the tag was read, and the lock was not asked for yet. Only a mutant does so.
    fn is_read_unlocked(&self) -> bool {
        let is_asked = self.holds || self.is_freed || self.holder.is_some() || self.failure.is_some();
        mutants::READS_UNLOCKED.is_on() && self.tag.is_some() && !is_asked
    }

    /// Whether the lock may still be granted.
    fn may_lock(&self) -> bool {
        let is_asked =
            matches!(self.running, Some(Step::Lock)) || self.running == Some(Step::Read) && !self.holds;
        is_asked || self.is_read_unlocked()
    }

    /// Whether a tag may still be read.
    fn may_read(&self) -> bool {
        self.tag.is_none() && (self.holds || self.may_lock())
    }

    /// Whether the block may still be written with this tag.
    fn may_write(&self, tag: Tag) -> bool {
        !self.has_content && self.holds && self.tag.is_some_and(|read| read < tag)
            || self.running == Some(Step::Read)
    }
}

/// Why an attempt has carried out nothing.
struct Missed {
    holders: Words,
    failures: Vec<Failure>,
}

/// A client that holds a lock which an operation waits for, and since when it was seen to.
type Holder = Option<(LockWord, Duration)>;
/// The words of the locks of a block that other clients hold, by replica.
pub(super) type Words = [Option<LockWord>; REPLICAS_MAX];

impl<F: Fabric + Clock> Client<F> {
    /// Carries out an operation, to the end of its last request.
    pub(super) async fn carry_out(&self, lane: usize, operation: &Operation) {
        let mut own = self.spare_lanes.borrow_mut().pop().unwrap_or_default();
        let outcome = self.operate(lane, operation, &mut own).await;
        self.spare_lanes.borrow_mut().push(own);
        if let Err(error) = outcome {
            operation.answer(Err(error));
        }
    }

    async fn operate(&self, lane: usize, operation: &Operation, own: &mut Lane) -> Result<(), BlocksError> {
        let claim = self.id(own).await?;
        let Backoff { first, longest } = self.backoff;
        let (begun, mut pause, mut failing_since) = (self.fabric.now(), first, None);
        let mut holders: [Holder; REPLICAS_MAX] = [None; REPLICAS_MAX];
        loop {
            let mut missed = match self.attempt(lane, operation, claim, own).await? {
                Ok(holders) => {
                    // A lock of a dead client at a minority is in nobody's way, but the replica stays behind.
                    let _later_operations_repeat_it = self.recover(own, operation.block, holders).await;
                    return Ok(());
                }
                Err(missed) => missed,
            };
            let now = self.fabric.now();
            for (holder, found) in holders.iter_mut().zip(missed.holders) {
                *holder = found.map(|word| match *holder {
                    Some((known, since)) if known == word => (word, since),
                    _ => (word, now),
                });
            }
            // A client that lives soon frees its locks, so that its lease is of no interest.
            let is_old = |holder: &Holder| holder.filter(|(_, since)| now - *since >= self.recovers_after());
            let old = holders.each_ref().map(|holder| is_old(holder).map(|(word, _)| word));
            missed.failures.extend(self.recover(own, operation.block, old).await);
            let spare = self.replicas.len() - self.majority();
            let patience = self.silence + HOLDER_MAX + self.spec.lease().unwrap_or_default();
            let stuck = |holder: &&Holder| holder.is_some_and(|(_, since)| now - since >= patience);
            let stuck: Vec<LockWord> =
                holders.iter().filter(stuck).flatten().map(|(word, _)| *word).collect();
            let failed = missed.failures.len();
            // Time that was spent waiting for others' locks does not count for the patience with failing replicas.
            failing_since = if failed > spare { failing_since.or(Some(now)) } else { None };
            if let Some(since) = failing_since {
                let is_final = |failure: &&Failure| !failure.may_pass();
                let lost = missed.failures.iter().filter(is_final).count();
                if lost > spare || now - since >= REACH_MAX {
                    return Err(self.no_majority(0, missed.failures, Ran::No));
                }
            } else if let Some(word) = stuck.first().filter(|_| stuck.len() + failed > spare) {
                let owner = word.owner().ok_or(BlocksError::Damaged("a lock that no client takes"))?;
                let (block, client) = (operation.block, owner.number().into());
                return Err(BlocksError::Locked { block, client, waited: patience });
            }
            if now - begun >= BUSY_MAX {
                return Err(BlocksError::Busy { block: operation.block, waited: now - begun });
            }
            if self.jobs.is_abandoned(lane) {
                return Ok(()); // Nobody waits for the outcome, and no lock is held.
            }
            self.fabric.sleep(self.random_below(pause)).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Tries once to carry out an operation, and answers it. Returns the words of the locks that other clients held. If
    /// this returns `Missed`, it carried out nothing.
    ///
    /// # Errors
    /// No attempt can succeed.
    async fn attempt(
        &self,
        lane: usize,
        operation: &Operation,
        claim: Claim,
        own: &mut Lane,
    ) -> Result<Result<Words, Missed>, BlocksError> {
        let (replicas, needed, word) = (self.replicas.len(), self.majority(), self.next_word(claim.id));
        let mut seats: [Seat; REPLICAS_MAX] = Default::default();
        let mut steps = [pin!(None), pin!(None), pin!(None), pin!(None), pin!(None)];
        let is_unlocked = operation.is_write && mutants::READS_UNLOCKED.is_on();
        let first = if is_unlocked { Step::Read } else { Step::Lock };
        for (index, (seat, step)) in seats.iter_mut().zip(&mut steps).enumerate().take(replicas) {
            seat.running = Some(first);
            step.set(Some(self.ask(index, std::mem::take(&mut own[index]), operation, (claim, word), first)));
        }
        let (mut stage, mut error) = (Stage::Locking, None);
        while let Some(answers) = answered(&mut steps).await {
            for (index, (buffers, answer)) in
                answers.into_iter().enumerate().filter_map(|(index, answer)| Some((index, answer?)))
            {
                own[index] = buffers;
                seats[index].note(answer);
            }
            loop {
                let next = self.next_stage(stage, operation, claim, &mut seats, own, needed);
                let next = next.unwrap_or_else(|failed| {
                    error = Some(failed);
                    Stage::GivenUp
                });
                let is_undone = matches!(next, Stage::Reading | Stage::Writing(_))
                    && !matches!(stage, Stage::Writing(_))
                    && !operation.is_answered.get()
                    && self.jobs.is_abandoned(lane);
                let next = if is_undone { Stage::GivenUp } else { next };
                if next == stage {
                    break;
                }
                stage = next;
            }
            if mutants::DROPPED_KEEPS_LOCKS.is_on() && stage == Stage::GivenUp && self.jobs.is_abandoned(lane)
            {
                return Ok(Ok(Words::default()));
            }
            for (index, (seat, step)) in seats.iter_mut().zip(&mut steps).enumerate().take(replicas) {
                if let Some(next) = seat.next(stage, self.frees_apart) {
                    seat.running = Some(next);
                    step.set(Some(self.ask(
                        index,
                        std::mem::take(&mut own[index]),
                        operation,
                        (claim, word),
                        next,
                    )));
                }
            }
            self.answer(stage, operation, &mut seats, needed);
        }
        match (error, stage) {
            (Some(error), _) => Err(error),
            (None, Stage::Freeing) => Ok(Ok(seats.each_ref().map(|seat| seat.holder))),
            _ => {
                let holders = seats.each_ref().map(|seat| seat.holder);
                Ok(Err(Missed { holders, failures: failures_of(&mut seats) }))
            }
        }
    }

    /// Returns the stage after this one, or the same.
    ///
    /// # Errors
    /// The operation is impossible. Nothing was written.
    fn next_stage(
        &self,
        stage: Stage,
        operation: &Operation,
        claim: Claim,
        seats: &mut [Seat; REPLICAS_MAX],
        own: &mut Lane,
        needed: usize,
    ) -> Result<Stage, BlocksError> {
        let count = |is_one: &dyn Fn(&Seat) -> bool| seats.iter().filter(|seat| is_one(seat)).count();
        Ok(match stage {
            Stage::Locking => {
                let held = count(&|seat| seat.holds);
                if held >= needed {
                    Stage::Reading
                } else if held + count(&Seat::may_lock) < needed {
                    Stage::GivenUp
                } else {
                    stage
                }
            }
            Stage::Reading => {
                let is_read = |seat: &Seat| seat.holds && seat.tag.is_some();
                let read = count(&is_read);
                if read >= needed {
                    self.choose(operation, claim, seats, own, needed)?
                } else if read + count(&Seat::may_read) < needed {
                    Stage::GivenUp
                } else {
                    stage
                }
            }
            Stage::Writing(tag) => {
                // A replica that was read late may have a newer block.
                seats
                    .iter_mut()
                    .for_each(|seat| seat.has_content |= seat.tag.is_some_and(|read| read >= tag));
                let have = seats.iter().filter(|seat| seat.has_content).count();
                let may = seats.iter().filter(|seat| seat.may_write(tag)).count();
                if have >= needed || have + may < needed { Stage::Freeing } else { stage }
            }
            Stage::Freeing | Stage::GivenUp => stage,
        })
    }

    /// Chooses what the operation writes or returns, once a majority was read.
    fn choose(
        &self,
        operation: &Operation,
        claim: Claim,
        seats: &mut [Seat; REPLICAS_MAX],
        own: &mut Lane,
        needed: usize,
    ) -> Result<Stage, BlocksError> {
        let read = seats.iter().enumerate().filter(|(_, seat)| seat.holds && seat.running.is_none());
        let newest = read.filter_map(|(index, seat)| Some((seat.tag?, index))).max();
        let (newest, index) = newest.expect("a majority was read");
        let mut content = operation.buffer.take();
        if operation.is_write {
            let tag = self.next_tag(claim.id, newest)?;
            content[..TAG_SIZE].copy_from_slice(tag.as_bytes());
            operation.content.set(content).expect("an operation chooses once");
            return Ok(Stage::Writing(tag));
        }
        content.clear();
        content.extend_from_slice(own[index].content());
        operation.content.set(content).expect("an operation chooses once");
        let have = seats.iter().filter(|seat| seat.holds && seat.tag == Some(newest)).count();
        if have < needed {
            return Ok(Stage::Writing(newest));
        }
        seats.iter_mut().for_each(|seat| seat.has_content = seat.holds && seat.tag == Some(newest));
        Ok(Stage::Freeing)
    }

    /// Answers the operation if its outcome is known: when a majority has the block and is free again, or nothing more
    /// can be done.
    fn answer(&self, stage: Stage, operation: &Operation, seats: &mut [Seat; REPLICAS_MAX], needed: usize) {
        if stage != Stage::Freeing || operation.is_answered.get() {
            return;
        }
        let have = seats.iter().filter(|seat| seat.has_content).count();
        if have < needed {
            // Even if all requests have certainly failed: the write may be completed when the debts are settled.
            let ran = if operation.is_write { Ran::Unknown } else { Ran::No };
            return operation.answer(Err(self.no_majority(have, failures_of(seats), ran)));
        }
        let is_free = |seat: &&Seat| seat.has_content && seat.is_freed;
        let free = seats.iter().filter(is_free).count();
        if free >= needed || seats.iter().all(|seat| seat.running.is_none()) {
            operation.answer(Ok(()));
        }
    }

    /// Sends a request of an attempt to a replica.
    async fn ask(
        &self,
        index: usize,
        mut own: Buffers,
        operation: &Operation,
        (claim, word): (Claim, LockWord),
        step: Step,
    ) -> (Buffers, Result<Answer, Failure>) {
        let (fabric, replica, block) = (&self.fabric, &self.replicas[index], operation.block);
        let answer = match step {
            Step::Lock => {
                let asked = replica.lock(fabric, &mut own, claim, (block, word)).await;
                asked.map(|holder| holder.map_or(Answer::Locked, Answer::HeldBy))
            }
            Step::Read => {
                replica.read(fabric, &mut own, block, word, !operation.is_write).await.map(Answer::Tag)
            }
            Step::Write | Step::WriteAndFree => {
                let (then_frees, until) = (step == Step::WriteAndFree, fabric.now() + REACH_MAX);
                let content = operation.content();
                let written =
                    replica.write(fabric, &mut own, (block, word), content, then_frees, until).await;
                written.map(|()| if then_frees { Answer::WrittenAndFreed } else { Answer::Written })
            }
            Step::Free => {
                let until = fabric.now() + REACH_MAX;
                replica.free(fabric, &mut own, (block, word), until).await.map(|()| Answer::Freed)
            }
        };
        (own, answer)
    }

    /// Returns the error of an operation at which too few replicas took part.
    pub(super) fn no_majority(&self, answered: usize, failures: Vec<Failure>, ran: Ran) -> BlocksError {
        let needed = self.majority();
        let is_lost =
            |failure: &&Failure| matches!(failure.error, BlocksError::Store(StoreError::MemoryLost { .. }));
        // While a majority has its memory, nothing is lost, so another error tells more.
        let is_majority_lost = failures.iter().filter(is_lost).count() >= needed;
        let telling = failures.iter().find(|failure| is_lost(failure) == is_majority_lost);
        // A fenced client must go on as another one, whatever the others' errors.
        let telling = failures.iter().find(|failure| failure.is_fenced()).or(telling);
        let telling = telling.or(failures.first()).expect("a majority is missed by failures");
        BlocksError::NoMajority { answered, needed, ran, reason: Box::new(telling.error.clone()) }
    }
}

fn failures_of(seats: &mut [Seat; REPLICAS_MAX]) -> Vec<Failure> {
    seats.iter_mut().filter_map(|seat| seat.failure.take()).collect()
}

/// Waits until at least one of the requests has ended. Returns the outputs of all that have ended; `None` if there are
/// no requests.
async fn answered<A: Future>(
    steps: &mut [Pin<&mut Option<A>>; REPLICAS_MAX],
) -> Option<[Option<A::Output>; REPLICAS_MAX]> {
    if steps.iter().all(|step| step.is_none()) {
        return None;
    }
    let answers = poll_fn(|cx| {
        let mut answers = [const { None }; REPLICAS_MAX];
        let mut has_ended = false;
        for (step, answer) in steps.iter_mut().zip(&mut answers) {
            let Some(running) = step.as_mut().as_pin_mut() else { continue };
            if let Poll::Ready(output) = running.poll(cx) {
                step.set(None);
                *answer = Some(output);
                has_ended = true;
            }
        }
        if has_ended { Poll::Ready(answers) } else { Poll::Pending }
    });
    Some(answers.await)
}

//! ABDLOCK: blocks on 2f + 1 replicas, updated in place under locks, with the classic verbs READ, WRITE and CAS alone.
//! It is the rival of PRISM-RS (PRISM, section 7), in the manner of DrTM. Any f replicas may be dead or slow.
//!
//! Each replica keeps for each block a lock word, a tag and the block's bytes ([`layout`]). An operation takes three
//! round trips, or four ([`Options::releases_apart`]):
//! 1. Lock: CAS the lock word from 0 to the word of this attempt, at all replicas. A majority, f + 1, must grant it.
//!    Without a majority, free what was granted, pause for a random time that doubles with each attempt, and try again.
//! 2. Read: at the replicas that have granted the lock, read tag and bytes (GET), or the tag alone (PUT).
//! 3. Write and free: write the tag and the bytes to the replicas that were read and have a lower tag, and CAS the lock
//!    word back to 0, in one chain. A PUT writes a tag that is higher than all tags that were read. A GET writes back
//!    what it has read; if a majority has it already, it only frees the locks.
//! 4. In the variant with four round trips, free the locks in a chain of its own, after a majority was written.
//!
//! Modules: `operation` decides what to ask which replica, and `replica` asks it; `recover` frees the locks of dead
//! clients; `layout` defines the bytes.
//!
//! Why it is linearizable:
//! * The lock of a replica makes read, comparison of tags, and write one step there, as the CAS of PRISM-RS does: a
//!   block is written only under the lock under which its tag was read, and only if that tag was lower. So the tag of a
//!   replica never falls.
//! * Once a write has ended, a majority has its tag or a higher one, and any two majorities share a replica. So each
//!   later operation reads this tag or a higher one. Therefore operations take effect in the order of their tags.
//! * A GET returns only what a majority has, so no later GET returns an older write.
//! * Tags are unique: they have the id of the client, which is claimed and never reused, and a counter that exceeds all
//!   counters that this client ever used.
//!
//! A WRITE is not atomic: another client could read a part of it, and a client that dies can leave a part. But nobody
//! reads a block without its lock, and the lock is freed only after the WRITE is complete: the chain's WRITE precedes
//! its CAS on every fabric. In a store without leases, the bytes that a dead client has left half written stay under
//! its lock for ever. In a store with leases, a WRITE goes to a spare copy of the block (module `recover`).
//!
//! Why freeing compares: a request with an unknown outcome may have been carried out or not, and the lock may have
//! passed to another client. A CAS from the attempt's own word frees this attempt's lock or nothing, because no two
//! attempts have the same word.
//!
//! Operations are jobs of the client's own task ([`Blocks::keeper`], [`crate::owned`]), which all handles share. If the
//! caller of an operation goes, the task frees the locks, and finishes a write that was begun. It also waits for late
//! answers after the caller has its outcome: a lock that is granted late is freed.
//!
//! Leases are an option of the store ([`Spec::lease_us`]). Without them, as in the paper's baseline, a client that dies
//! while it holds locks blocks these blocks for ever. Operations on them fail with [`BlocksError::Locked`], unless a
//! majority of the block's locks is free. With leases, a client renews an entry at each replica, and a lock whose owner
//! has stopped to do so is freed once the owner was fenced there. This costs memory and time: each block has two
//! copies, and a GET reads both.
//!
//! Differs from the paper (7; its text was not available, so the protocol is a reconstruction):
//! * A PUT reads tags alone. The paper's comparison gains nothing from blocks that nobody looks at.
//! * Locks have tokens, and freeing compares.
//!
//! Invariant: when an operation's job has ended, the client holds no lock of it, except debts of a replica
//! (module `replica`). Only a fence, or the end of the client, makes a debt void.
//! Invariant: only a CAS that swapped counts for a lock or a claim.

pub mod layout;
pub mod mutants;
mod operation;
mod recover;
mod replica;
pub mod service;
mod system;

use super::tag::{Tag, WriterId};
use super::{Blocks, BlocksError, check_access};
use crate::lease::{ClientId, LockWord};
use crate::owned::{Closed, Jobs};
use crate::quorum::quorum;
use crate::store::{Members, StoreError};
use crate::system::{Backoff, Options};
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_remote::fabric::{DEADLINE, Ran};
use farside_remote::{Fabric, Status};
use layout::{Spec, TAG_SIZE};
use operation::{BACKOFF, Lane, Operation, REACH_MAX};
use recover::Watch;
use replica::{Buffers, Claim, Failure, Replica};
use service::AbdLockKind;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Kind of the store in the catalog.
pub const KIND: &str = "abd-lock";

/// Number of operations that a client carries out at the same time. An operation that has its outcome may still wait
/// for a slow replica, so a client has more lanes than a core has tasks.
const LANES: usize = 128;
/// Time of silence after which a node ends a session, unless the client's options give another.
const SILENCE: Duration = Duration::from_secs(5);
/// Pause between two looks whether the client's task runs.
const TASK_PAUSE: Duration = Duration::from_millis(1);

/// Handle of a client of one store. It runs one operation at a time: give each task its own, by [`AbdLock::another`].
/// The client's task must run beside it: see [`Blocks::keeper`].
pub struct AbdLock<F> {
    handles: Rc<Handles<F>>,
    /// The last operation, whose buffer is reused.
    operation: Rc<Operation>,
}

/// All handles of a client. Dropping this value closes the client.
struct Handles<F>(Rc<Client<F>>);

impl<F> Drop for Handles<F> {
    fn drop(&mut self) {
        self.0.jobs.close();
    }
}

/// Client of one store, which its handles and its task share.
struct Client<F> {
    fabric: F,
    spec: Spec,
    replicas: Box<[Replica]>,
    /// One for each replica, if the store has leases.
    watches: Box<[Watch]>,
    jobs: Jobs<Rc<Operation>, ()>,
    /// Buffers that no operation uses.
    spare_lanes: RefCell<Vec<Lane>>,
    frees_apart: bool,
    backoff: Backoff,
    silence: Duration,
    id: Cell<Option<Claim>>,
    /// Counter of the newest tag.
    counter: Cell<u64>,
    /// Token of the newest attempt.
    token: Cell<u64>,
    draws: RefCell<Draws>,
}

impl<F: Fabric + Clock> Blocks for AbdLock<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn block_len(&self) -> usize {
        self.client().spec.block as usize
    }

    fn blocks(&self) -> u64 {
        self.client().spec.blocks
    }

    async fn read(&mut self, block: u64, into: &mut [u8]) -> Result<(), BlocksError> {
        check_access(self, block, into.len())?;
        let buffer = self.prepare(block, false);
        let operation = self.carry_out(buffer).await?;
        into.copy_from_slice(&operation.content.get().expect("a read returns a block")[TAG_SIZE..]);
        Ok(())
    }

    async fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), BlocksError> {
        check_access(self, block, bytes.len())?;
        let mut buffer = self.prepare(block, true);
        buffer.extend_from_slice(&[0; TAG_SIZE]);
        buffer.extend_from_slice(bytes);
        self.carry_out(buffer).await.map(drop)
    }

    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        let client = Rc::clone(self.client());
        Box::pin(async move { client.keep().await })
    }
}

impl<F: Fabric + Clock> AbdLock<F> {
    fn client(&self) -> &Rc<Client<F>> {
        &self.handles.0
    }

    /// Prepares an operation. Returns its buffer, which is empty.
    fn prepare(&mut self, block: u64, is_write: bool) -> Vec<u8> {
        if Rc::get_mut(&mut self.operation).is_none() {
            // The client's task is still busy with the last operation.
            self.operation = Rc::default();
        }
        Rc::get_mut(&mut self.operation).expect("nobody shares a new operation").reset(block, is_write)
    }

    /// Carries out the operation that was prepared.
    async fn carry_out(&self, buffer: Vec<u8>) -> Result<&Operation, BlocksError> {
        let (client, operation) = (self.client(), &self.operation);
        operation.buffer.set(buffer);
        client.wait_for_task().await?;
        let mut job = pin!(client.jobs.carry_out(Rc::clone(operation)));
        let mut has_job_ended = false;
        poll_fn(|cx| {
            if !has_job_ended && let Poll::Ready(ended) = job.as_mut().poll(cx) {
                if ended == Err(Closed) {
                    let ran = if operation.is_write { Ran::Unknown } else { Ran::No };
                    return Poll::Ready(Err(BlocksError::NotKept { ran }));
                }
                has_job_ended = true;
            }
            // If the job has not ended yet, dropping `job` leaves the rest of it to the client's task.
            operation.poll_outcome(cx.waker())
        })
        .await?;
        Ok(operation)
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> AbdLock<F> {
        AbdLock { handles: Rc::clone(&self.handles), operation: Rc::default() }
    }

    /// Number of replicas at which the client may hold a lock that no operation uses, since a request has an unknown
    /// outcome. The client's task frees these locks.
    pub fn replicas_with_debts(&self) -> usize {
        self.client().replicas.iter().filter(|replica| replica.has_debts()).count()
    }

    /// Creates a client of the store that `members` describe. Sends no request. Members that did not respond are asked
    /// again by each operation.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub fn of(fabric: F, members: &Members, options: &Options) -> Result<AbdLock<F>, StoreError> {
        members.check_replicas::<AbdLockKind>()?;
        let (count, members) = (members.list().len(), Rc::new(members.clone()));
        let replica = |index| Replica::new(&fabric, &members, index);
        let replicas = (0..count).map(replica).collect::<Result<Box<[_]>, _>>()?;
        let spec = replicas.iter().find_map(Replica::spec).expect("a member has a description");
        let client = Client {
            fabric,
            spec,
            watches: spec.lease().into_iter().flat_map(|lease| vec![lease; count]).map(Watch::new).collect(),
            replicas,
            jobs: Jobs::new(LANES),
            spare_lanes: RefCell::default(),
            frees_apart: options.releases_apart,
            backoff: options.backoff.unwrap_or(BACKOFF),
            silence: options.silence.unwrap_or(SILENCE),
            id: Cell::new(None),
            counter: Cell::new(0),
            token: Cell::new(0),
            draws: RefCell::new(Draws(options.entropy)),
        };
        Ok(AbdLock { handles: Rc::new(Handles(Rc::new(client))), operation: Rc::default() })
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Runs the client's task: carries out operations, renews the lease and settles debts, until the last handle was
    /// dropped.
    async fn keep(&self) {
        let mut serving = pin!(self.jobs.serve(|lane, operation: Rc<Operation>| async move {
            self.carry_out(lane, &operation).await;
        }));
        let (is_over, silence) = (Cell::new(false), self.silence);
        let settle = |index: usize| {
            let replica = self.replicas.get(index)?;
            Some(replica.settle(&self.fabric, silence, || is_over.get()))
        };
        let mut settling =
            [pin!(settle(0)), pin!(settle(1)), pin!(settle(2)), pin!(settle(3)), pin!(settle(4))];
        let renew = |index: usize| {
            let (replica, lease) = (self.replicas.get(index)?, self.spec.lease()?);
            Some(replica.keep_lease(&self.fabric, lease, || self.id.get().map(|claim| claim.id)))
        };
        let mut renewing = [pin!(renew(0)), pin!(renew(1)), pin!(renew(2)), pin!(renew(3)), pin!(renew(4))];
        poll_fn(|cx| {
            is_over.set(is_over.get() || serving.as_mut().poll(cx).is_ready());
            for place in &mut settling {
                if let Some(running) = place.as_mut().as_pin_mut()
                    && running.poll(cx).is_ready()
                {
                    place.set(None);
                }
            }
            // While the client settles its debts, it still holds locks.
            for place in renewing.iter_mut().filter_map(|place| place.as_mut().as_pin_mut()) {
                let Poll::Pending = place.poll(cx);
            }
            let is_settled = settling.iter().all(|place| place.is_none());
            if is_over.get() && is_settled { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// # Errors
    /// The client's task has ended, or has not run for a while.
    async fn wait_for_task(&self) -> Result<(), BlocksError> {
        if self.jobs.is_served() {
            return Ok(());
        }
        let until = self.fabric.now() + DEADLINE;
        while !self.jobs.is_served() {
            if self.jobs.is_closed() || self.fabric.now() >= until {
                return Err(BlocksError::NotKept { ran: Ran::No });
            }
            self.fabric.sleep(TASK_PAUSE).await;
        }
        Ok(())
    }

    fn majority(&self) -> usize {
        let f = self.replicas.len() / 2;
        if mutants::MINORITY_QUORUM.is_on() { f.max(1) } else { f + 1 }
    }

    /// Returns this client's id with its nonce. Claims an id if the client has none.
    async fn id(&self, own: &mut Lane) -> Result<Claim, BlocksError> {
        if let Some(claim) = self.id.get() {
            return Ok(claim);
        }
        let (fabric, writers) = (&self.fabric, self.spec.writers);
        let until = fabric.now() + REACH_MAX;
        let highest = self
            .at_majority(own, |replica, own| async move { replica.highest_id(fabric, own, until).await })
            .await;
        let highest = highest.map_err(|failures| self.no_majority(0, failures, Ran::No))?;
        let highest = highest.into_iter().max().expect("a majority has answered");
        for number in highest.saturating_add(1)..=u64::from(writers) {
            let Some(id) = WriterId::new(number) else { break };
            let nonce = self.draws.borrow_mut().next().max(1);
            let claim = Claim { id, nonce };
            let claims = self.at_majority(own, |replica, own| async move {
                replica.claim(fabric, own, claim, number - 1, until).await
            });
            match claims.await {
                Ok(_) => {
                    // Another operation may have claimed one meanwhile.
                    let claimed = self.id.get().unwrap_or(claim);
                    self.id.set(Some(claimed));
                    return Ok(claimed);
                }
                // The id was claimed by another client, or by an attempt of this one whose answer was lost.
                Err(failures) if failures.iter().any(is_taken) => {}
                Err(failures) => return Err(self.no_majority(0, failures, Ran::No)),
            }
        }
        Err(BlocksError::NoWriterId(writers))
    }

    /// Sends a request that holds nothing to all replicas, until a majority has carried it out.
    ///
    /// # Errors
    /// The failures, if there is no majority.
    async fn at_majority<'r, T, A: Future<Output = Result<T, Failure>>>(
        &'r self,
        own: &'r mut Lane,
        mut ask: impl FnMut(&'r Replica, &'r mut Buffers) -> A,
    ) -> Result<Vec<T>, Vec<Failure>> {
        let mut each = self.replicas.iter().zip(own);
        let mut next = || each.next().map(|(replica, own)| ask(replica, own));
        let mut asked = [pin!(next()), pin!(next()), pin!(next()), pin!(next()), pin!(next())];
        let outcomes = quorum(self.majority(), asked.each_mut().map(|asked| asked.as_mut())).await;
        match outcomes {
            Ok(outcomes) => Ok(outcomes.into_iter().flatten().flatten().collect()),
            Err(outcomes) => Err(outcomes.into_iter().flatten().filter_map(Result::err).collect()),
        }
    }

    /// Returns the lock word of a new attempt.
    fn next_word(&self, id: WriterId) -> LockWord {
        self.token.set(self.token.get() + 1);
        let owner = u16::try_from(id.number()).ok().and_then(ClientId::new);
        let owner = owner.expect("the store has no larger ids");
        LockWord::new(owner, self.token.get()).expect("no client makes 2^48 attempts")
    }

    /// Returns the tag of a new write to a block. `newest` is the highest tag that a majority has.
    ///
    /// # Errors
    /// The counter has reached its end, which no correct client causes.
    fn next_tag(&self, id: WriterId, newest: Tag) -> Result<Tag, BlocksError> {
        let counter = newest.counter().max(self.counter.get()) + 1;
        let tag = Tag::new(counter, id).ok_or(BlocksError::Damaged("a tag with the highest counter"))?;
        self.counter.set(counter);
        Ok(tag)
    }

    /// Draws a time below `pause`.
    fn random_below(&self, pause: Duration) -> Duration {
        Duration::from_nanos(self.draws.borrow_mut().below(pause.as_nanos() as u64 + 1))
    }
}

/// Whether a claim failed because the id is taken.
fn is_taken(claim: &Failure) -> bool {
    matches!(claim.error, BlocksError::Refused(Status::CasFailed))
}

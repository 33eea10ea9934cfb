//! Epochs of a client: they tell the nodes which of its operations have ended, so that a buffer is not reused while an
//! operation may still follow a pointer to it in a later chain ([`farside_remote::leases`]).
//!
//! A client of a store with such operations leases an id, binds its sessions, and opens its [`Epochs`]. Each operation
//! holds a [`Guard`] from before it reads its first pointer until all its requests are answered. The client publishes
//! its next epoch with each renewal of its lease ([`crate::lease::Leases::renew_and_advance`]), and also when an
//! ALLOCATE finds no free buffer ([`Epochs::advance`]).
//!
//! A guard belongs to the *generation* that was current when its operation began: the highest epoch that every member
//! has acknowledged. The epoch after the current one is published once all guards of earlier generations are gone. So
//! there are at most two generations.
//!
//! Rules for operations:
//! - A pointer is followed only under the guard under which it was read. A client keeps no pointers to buffers between
//!   operations.
//! - An operation that WRITEs or CASes by such a pointer is a job of [`crate::owned`], so that its guard outlives its
//!   requests even if its caller goes. If such a request is never answered, its guard is kept: [`Guard::keep`].
//! - An operation that allocates a buffer in one chain and installs it in another runs both over one session. If the
//!   session ends in between, the buffer belongs to the node.
//!
//! Invariant: while the published epoch is E, all operations that began before E - 1 was acknowledged have ended.
//! Invariant: an epoch at a member never falls. A late or repeated request to publish an epoch changes nothing.
//! Invariant: a client begins no operation before its nonce and its first epoch are at every member.

use crate::lease::{ClientId, Entry, Lease, LeaseError, Leases, MEMBERS_MAX, Table};
use crate::quorum::quorum;
use farside_remote::clock::Clock;
use farside_remote::{Capabilities, ChainBuf, Fabric, Mode, Reply, Status, cas, read_as};
use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use zerocopy::big_endian::U64;

/// Mutants of epochs.
pub mod mutants {
    farside_remote::mutants! {
        /// The next epoch is published although an operation of an earlier generation is running.
        EPOCH_ADVANCED_EARLY = "EpochAdvancedEarly";
    }
}

/// The epochs of one client at all members of a store. All tasks of the client share them.
pub struct Epochs<F> {
    fabric: F,
    tables: Rc<[Cell<Table>]>,
    id: ClientId,
    /// The current generation: the highest epoch that all members have acknowledged.
    current: Cell<u64>,
    /// Number of guards of the even and of the odd generation. One is the current generation, one that before it.
    guards: [Cell<u64>; 2],
    /// The highest epoch that each member has acknowledged.
    acknowledged: [Cell<u64>; MEMBERS_MAX],
}

/// An operation in progress. While it lives, the operation may follow pointers that it has read.
#[must_use = "the operation ends when its guard is dropped"]
pub struct Guard<'a>(&'a Cell<u64>);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Guard<'_> {
    /// Keeps the operation in progress for ever, since one of its requests may still run. The client then publishes no
    /// further epoch, and should be closed: once it is fenced, no request of it runs.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl<F: Fabric + Clock + Clone> Epochs<F> {
    /// Writes the lease's nonce and a first epoch at all members. The caller has bound its sessions to the nonce at all
    /// members ([`Leases::bind`]).
    ///
    /// # Errors
    /// [`LeaseError`]: a member has no epoch, so the client must begin no operation.
    pub async fn open(leases: &Leases<F>, lease: &Lease) -> Result<Epochs<F>, LeaseError> {
        leases.hold(lease).await?;
        let epochs = Epochs {
            fabric: leases.fabric().clone(),
            tables: Rc::clone(leases.tables()),
            id: lease.id(),
            current: Cell::new(0),
            guards: [const { Cell::new(0) }; 2],
            acknowledged: [const { Cell::new(0) }; MEMBERS_MAX],
        };
        let mut highest = 0;
        for (table, acknowledged) in epochs.tables.iter().zip(&epochs.acknowledged) {
            let found = epochs.read_at(&table.get()).await?;
            acknowledged.set(found);
            highest = highest.max(found);
        }
        // A late request of an earlier holder publishes at most the epoch after the highest.
        let first = highest.checked_add(2).ok_or(LeaseError::Exhausted)?;
        epochs.publish(first).await?;
        Ok(epochs)
    }
}

impl<F: Fabric> Epochs<F> {
    /// Begins an operation.
    #[inline]
    pub fn enter(&self) -> Guard<'_> {
        let guards = &self.guards[parity(self.current.get())];
        guards.set(guards.get() + 1);
        Guard(guards)
    }

    /// The current generation.
    pub fn current(&self) -> u64 {
        self.current.get()
    }

    /// Publishes the next epoch at all members. A caller that waits for free memory holds no guard meanwhile: memory
    /// that its own operation may reach is not reused. Returns false if an operation of an earlier generation still
    /// runs, so that nothing was published.
    ///
    /// # Errors
    /// [`LeaseError`]: a member may not have the epoch, so the generation stays. The call may be repeated.
    pub async fn advance(&self) -> Result<bool, LeaseError> {
        let Some(next) = self.next() else { return Ok(false) };
        self.publish(next).await?;
        Ok(true)
    }

    /// The epoch that may be published; `None` if an operation of an earlier generation still runs.
    pub(crate) fn next(&self) -> Option<u64> {
        let current = self.current.get();
        let are_over = self.guards[parity(current.wrapping_add(1))].get() == 0;
        (are_over || mutants::EPOCH_ADVANCED_EARLY.is_on()).then(|| current.checked_add(1))?
    }

    /// Publishes an epoch at the members that have not acknowledged it yet, then makes it the current generation.
    pub(crate) async fn publish(&self, epoch: u64) -> Result<(), LeaseError> {
        let ask = |member: usize| (member < self.tables.len()).then(|| self.publish_at(member, epoch));
        let mut asked = [pin!(ask(0)), pin!(ask(1)), pin!(ask(2)), pin!(ask(3)), pin!(ask(4))];
        let asked = asked.each_mut().map(|asked| asked.as_mut());
        quorum(self.tables.len(), asked).await.map_err(|outcomes| {
            outcomes.into_iter().flatten().find_map(Result::err).expect("a quorum is missed by errors")
        })?;
        self.current.set(self.current.get().max(epoch));
        Ok(())
    }

    fn acknowledge(&self, member: usize, epoch: u64) {
        let acknowledged = &self.acknowledged[member];
        acknowledged.set(acknowledged.get().max(epoch));
    }

    async fn publish_at(&self, member: usize, epoch: u64) -> Result<(), LeaseError> {
        if self.acknowledged[member].get() >= epoch {
            return Ok(());
        }
        let (table, known) = (self.tables[member].get(), self.acknowledged[member].get());
        table.raise(&self.fabric, table.epoch(self.id), known, epoch).await?;
        self.acknowledge(member, epoch);
        Ok(())
    }

    /// Replaces this client's entry at a member by what `next` returns for it, and publishes an epoch in the same
    /// chain. The fabric has conditional ops.
    pub(crate) async fn swap_and_publish(
        &self,
        member: usize,
        epoch: u64,
        next: impl Fn(Entry) -> Option<Entry>,
    ) -> Result<(), LeaseError> {
        let (table, epoch_word) = (self.tables[member].get(), U64::new(epoch));
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(table.key);
        let entry = chain.also(read_as::<Entry>(table.entry(self.id)));
        self.fabric.run(table.node, &chain, &mut reply).await?;
        let mut found = *reply.get(entry).map_err(LeaseError::Refused)?;
        while let Some(new) = next(found) {
            let mut chain = buffer.begin(table.key);
            let old = chain.also(cas(Mode::Eq, table.entry(self.id), &found, &new));
            let raised = chain.then(cas(Mode::Lt, table.epoch(self.id), &epoch_word, &epoch_word));
            self.fabric.run(table.node, &chain, &mut reply).await?;
            match reply.status(old) {
                Status::Ok => {
                    if reply.status(raised) == Status::Ok {
                        self.acknowledge(member, epoch);
                    }
                    return Ok(());
                }
                Status::CasFailed => found = *reply.get(old).map_err(LeaseError::Refused)?,
                refused => return Err(LeaseError::Refused(refused)),
            }
        }
        Err(LeaseError::Lost)
    }

    /// Whether the fabric to a member has no conditional ops, so that a CAS changes one word and compares for equality.
    pub(crate) fn is_plain(&self, member: usize) -> bool {
        !self.fabric.capabilities(self.tables[member].get().node).contains(Capabilities::CONDITIONAL_OPS)
    }

    async fn read_at(&self, table: &Table) -> Result<u64, LeaseError> {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(table.key);
        let epoch = chain.also(read_as::<U64>(table.epoch(self.id)));
        self.fabric.run(table.node, &chain, &mut reply).await?;
        reply.get(epoch).map(|epoch| epoch.get()).map_err(LeaseError::Refused)
    }
}

fn parity(generation: u64) -> usize {
    (generation & 1) as usize
}

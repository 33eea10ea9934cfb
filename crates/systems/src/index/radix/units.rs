//! Memory of leaves, nodes and values that lie apart: units in chunks, which clients claim and allocate without the
//! node's CPU.
//!
//! A client claims a chunk of a member for units of one class, by a CAS in the chunk table. Only the chunk's owner
//! allocates from it. An owner is an id, not a client: whoever leases the id next goes on with its chunks.
//!
//! Each unit has a state: a generation, and whether the unit is taken. The owner writes `taken` in the list of the new
//! leaf or node. The client whose CAS has unlinked a unit keeps it in its *limbo*. A snapshot then notes the holders of
//! all ids with their epochs, and the units of the snapshot are free once each noted holder has raised its epoch by two
//! or has left. A client that died is fenced and recovered first. The unit's state becomes free, with the next
//! generation, by a CAS, so that it happens once. An owner finds units that others have freed by reading the states of
//! its chunks.
//!
//! Switched nodes are never unlinked: such a node keeps its place in the tree for ever, and only gains slots. A copied
//! node is unlinked, and retired like a leaf, by the client that has replaced it.
//!
//! Invariant: a unit that some slot may point to, or that an operation may still reach by a pointer that it has read,
//! is taken.
//! Invariant: a unit is in at most one place: in the list of its owner, in an operation, in the tree, or in a limbo.

use super::counters::Counters;
use super::layout::{Chunk, Claim, Class, Far, State};
use super::mutants;
use super::session::{Session, refused};
use crate::index::IndexError;
use crate::index::session::WORDS_PER_READ;
use crate::lease::ClientId;
use farside_remote::clock::Clock;
use farside_remote::leases::Holder;
use farside_remote::{ChainBuf, Fabric, Mode, Reply, Status, cas, fetch_add, write};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Number of CAS in one chain.
const CAS_PER_CHAIN: usize = 32;
/// Pause of a lane that waits for another one's refill.
const PAUSE: Duration = Duration::from_micros(10);
/// Part of a chunk's units that must be free so that its owner does not claim another chunk.
const WORTH: u64 = 8;

/// A unit that an operation has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Unit {
    pub(in crate::index) at: Far,
    pub(in crate::index) class: Class,
    pub(in crate::index) generation: u32,
    /// Location of the state.
    pub(in crate::index) state: Far,
    number: u64,
    chunk: Chunk,
}

impl Unit {
    /// The state of the unit while it is taken.
    pub(in crate::index) fn taken(&self) -> U64 {
        U64::new(State { generation: self.generation, is_taken: true }.word())
    }

    /// The state of the unit after an operation has given it back. It has another generation, so that `sweep` knows
    /// that the unit was not taken all the time.
    fn given_back(&self) -> State {
        State { generation: self.generation.wrapping_add(1), is_taken: false }
    }
}

/// The memory that a client allocates from.
#[derive(Default)]
pub(in crate::index) struct Units {
    pools: RefCell<BTreeMap<(usize, Class), Pool>>,
    /// Chunks that an earlier holder of the id has claimed, by member. A member is absent until its table was read.
    inherited: RefCell<BTreeMap<usize, Vec<(Chunk, Class)>>>,
    next_member: Cell<usize>,
    limbo: RefCell<Limbo>,
}

/// Units of one class at one member.
#[derive(Default)]
struct Pool {
    free: Vec<(Chunk, u64, u32)>,
    chunks: Vec<Chunk>,
    /// Chunk whose units were never taken, with the number of the next one.
    fresh: Option<(Chunk, u64)>,
    /// Index of the chunk whose states are read next.
    next_scan: usize,
    /// Units of operations in progress, which no slot points to.
    in_use: BTreeSet<(Chunk, u64)>,
    /// During a refill, the units that some operation has had since its start. Their states may be outdated.
    excluded: Option<BTreeSet<(Chunk, u64)>>,
}

/// Units that this client has unlinked.
#[derive(Default)]
struct Limbo {
    added: Vec<Retired>,
    snapshot: Option<Snapshot>,
    is_in_step: bool,
}

/// A unit that was unlinked.
#[derive(Clone, Copy, Debug)]
struct Retired {
    at: Far,
    class: Class,
    generation: u32,
}

/// Holders whose operations may still reach the snapshot's units.
struct Snapshot {
    units: Vec<Retired>,
    holders: Vec<(ClientId, Holder)>,
}

impl Units {
    /// Takes a unit, at the members in turn.
    ///
    /// # Errors
    /// [`IndexError::OutOfMemory`] if no member has a free unit.
    pub(in crate::index) async fn take<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        class: Class,
    ) -> Result<Unit, IndexError> {
        let members = session.layout.members.len();
        let first = self.next_member.replace((self.next_member.get() + 1) % members);
        for member in (0..members).map(|index| (first + index) % members) {
            if let Some(unit) = self.take_at(session, member, class).await? {
                return Ok(unit);
            }
        }
        Err(IndexError::OutOfMemory)
    }

    async fn take_at<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        member: usize,
        class: Class,
    ) -> Result<Option<Unit>, IndexError> {
        loop {
            if let Some(unit) = self.pop(session, member, class) {
                return Ok(Some(unit));
            }
            let is_refilling = {
                let mut pools = self.pools.borrow_mut();
                let pool = pools.entry((member, class)).or_default();
                let is_refilling = pool.excluded.is_some();
                if !is_refilling {
                    pool.excluded = Some(pool.in_use.clone());
                }
                is_refilling
            };
            if is_refilling {
                session.fabric.sleep(PAUSE).await;
                continue;
            }
            let refilled = self.refill(session, member, class).await;
            self.with_pool(member, class, |pool| pool.excluded = None);
            if !refilled? {
                return Ok(None);
            }
        }
    }

    fn with_pool<T>(&self, member: usize, class: Class, change: impl FnOnce(&mut Pool) -> T) -> T {
        change(self.pools.borrow_mut().entry((member, class)).or_default())
    }

    fn pop<F>(&self, session: &Session<F>, member: usize, class: Class) -> Option<Unit> {
        let layout = &session.layout;
        let (chunk, number, generation) = self.with_pool(member, class, |pool| {
            let popped = pool.free.pop().or_else(|| {
                let (chunk, next) = pool.fresh?;
                pool.fresh = (next + 1 < layout.units(class)).then_some((chunk, next + 1));
                Some((chunk, next, 0))
            });
            if let Some((chunk, number, _)) = popped {
                pool.in_use.insert((chunk, number));
                pool.excluded.iter_mut().for_each(|excluded| _ = excluded.insert((chunk, number)));
            }
            popped
        })?;
        let (at, state) = (layout.unit(chunk, class, number), layout.state(chunk, number));
        Some(Unit { at, class, generation, state, number, chunk })
    }

    /// Notes that the unit's state was written, and that a slot points to the unit.
    pub(in crate::index) fn linked(&self, unit: &Unit) {
        self.with_pool(unit.chunk.member, unit.class, |pool| {
            pool.in_use.remove(&(unit.chunk, unit.number));
        });
    }

    /// Takes back a unit to which no slot has ever pointed. If its state was written, it is written again.
    ///
    /// # Errors
    /// The state was not written, so the unit is lost until `heal` finds it.
    pub(in crate::index) async fn give_back<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        unit: Unit,
        was_written: bool,
    ) -> Result<(), IndexError> {
        let mut generation = unit.generation;
        if was_written {
            let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
            let table = &session.layout.members[unit.chunk.member];
            let free = U64::new(unit.given_back().word());
            generation = unit.given_back().generation;
            let mut chain = buffer.begin(table.key());
            let written = chain.also(write(session.layout.addr(unit.state, 8)?, free.as_bytes()));
            session.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            if reply.status(written) != Status::Ok {
                return Err(refused(reply.status(written)));
            }
        }
        self.with_pool(unit.chunk.member, unit.class, |pool| {
            pool.in_use.remove(&(unit.chunk, unit.number));
            pool.free.push((unit.chunk, unit.number, generation));
        });
        Ok(())
    }

    /// Finds free units of a pool that has none. Returns false if there are none.
    async fn refill<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        member: usize,
        class: Class,
    ) -> Result<bool, IndexError> {
        self.find_inherited(session, member).await?;
        let chunks = self.with_pool(member, class, |pool| pool.chunks.len());
        let worth = session.layout.units(class) / WORTH;
        let mut found = 0;
        if chunks > 0 {
            found = self.scan_next(session, member, class).await?;
        }
        if found >= worth.max(1) || self.claim(session, member, class).await? {
            return Ok(true);
        }
        for _ in 1..chunks {
            if found > 0 {
                break;
            }
            found = self.scan_next(session, member, class).await?;
        }
        Ok(found > 0)
    }

    /// Reads the states of the pool's next chunk. Returns the number of free units that it has found.
    async fn scan_next<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        member: usize,
        class: Class,
    ) -> Result<u64, IndexError> {
        let chunk = self.with_pool(member, class, |pool| {
            let chunk = pool.chunks[pool.next_scan % pool.chunks.len()];
            pool.next_scan = (pool.next_scan + 1) % pool.chunks.len();
            chunk
        });
        let units = session.layout.units(class);
        let mut found = 0;
        for first in (0..units).step_by(WORDS_PER_READ as usize) {
            let count = (units - first).min(WORDS_PER_READ);
            let words = session.words(session.layout.state(chunk, first), count).await?;
            self.with_pool(member, class, |pool| {
                for (number, word) in (first..).zip(words) {
                    let state = State::of(word);
                    let is_excluded = |excluded: &BTreeSet<_>| excluded.contains(&(chunk, number));
                    if !state.is_taken && !pool.excluded.as_ref().is_some_and(is_excluded) {
                        pool.free.push((chunk, number, state.generation));
                        found += 1;
                    }
                }
            });
        }
        Ok(found)
    }

    /// Claims a chunk. Returns false if the member has none left.
    async fn claim<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        member: usize,
        class: Class,
    ) -> Result<bool, IndexError> {
        let (layout, table) = (&session.layout, &session.layout.members[member]);
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let one = U64::new(1);
        let mut chain = buffer.begin(table.key());
        let hint = chain.also(fetch_add(layout.addr(layout.hint(member), 8)?, &one));
        session.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
        let hint = reply.get(hint).map_err(refused)?.get();
        let first = Chunk { member, number: hint % table.pieces };
        if self.claim_one(session, first, class).await? {
            return Ok(true);
        }
        // The hint is wrong, or the member is almost full.
        for start in (0..table.pieces).step_by(WORDS_PER_READ as usize) {
            let count = (table.pieces - start).min(WORDS_PER_READ);
            let claims = session.words(layout.claim(Chunk { member, number: start }), count).await?;
            for (number, _) in (start..).zip(claims).filter(|(_, word)| *word == 0) {
                if self.claim_one(session, Chunk { member, number }, class).await? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Claims a chunk. Returns false if another client has claimed it.
    async fn claim_one<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        chunk: Chunk,
        class: Class,
    ) -> Result<bool, IndexError> {
        let (layout, table) = (&session.layout, &session.layout.members[chunk.member]);
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let claim = U64::new(Claim { owner: session.id(), class }.word());
        let at = layout.addr(layout.claim(chunk), 8)?;
        let mut chain = buffer.begin(table.key());
        let claimed = chain.also(cas(Mode::Eq, at, &U64::ZERO, &claim));
        session.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
        match reply.status(claimed) {
            Status::Ok => {
                self.with_pool(chunk.member, class, |pool| {
                    pool.chunks.push(chunk);
                    pool.fresh = Some((chunk, 0));
                });
                Ok(true)
            }
            Status::CasFailed => Ok(false),
            status => Err(refused(status)),
        }
    }

    /// Finds the chunks of this id at a member, once.
    async fn find_inherited<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        member: usize,
    ) -> Result<(), IndexError> {
        if self.inherited.borrow().contains_key(&member) {
            return Ok(());
        }
        let (layout, chunks) = (&session.layout, session.layout.members[member].pieces);
        let mut own = Vec::new();
        for first in (0..chunks).step_by(WORDS_PER_READ as usize) {
            let count = (chunks - first).min(WORDS_PER_READ);
            let at = layout.claim(Chunk { member, number: first });
            for (number, word) in (first..).zip(session.words(at, count).await?) {
                if let Some(claim) = Claim::of(word)?
                    && claim.owner == session.id()
                {
                    own.push((Chunk { member, number }, claim.class));
                }
            }
        }
        // Another lane may have done the same, and claimed a chunk meanwhile.
        if self.inherited.borrow_mut().insert(member, own.clone()).is_none() {
            for (chunk, class) in own {
                self.with_pool(member, class, |pool| {
                    if !pool.chunks.contains(&chunk) {
                        pool.chunks.push(chunk);
                    }
                });
            }
        }
        Ok(())
    }

    /// Retires a leaf that this client's CAS has unlinked, or a value whose pointer it has replaced.
    pub(in crate::index) fn retire(&self, at: Far, class: Class, generation: u32) {
        self.limbo.borrow_mut().added.push(Retired { at, class, generation });
    }

    /// Number of units that wait until they may be reused.
    pub(in crate::index) fn waiting(&self) -> usize {
        let limbo = self.limbo.borrow();
        limbo.added.len() + limbo.snapshot.as_ref().map_or(0, |snapshot| snapshot.units.len())
    }

    /// Makes a step towards the reuse of retired units: takes a snapshot, or frees the units of one whose holders have
    /// advanced. Recovers a holder whose lease has expired. `lane` has no lock.
    ///
    /// # Errors
    /// [`IndexError`]; a later step goes on.
    pub(in crate::index) async fn step<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        lane: u16,
        counters: &Counters,
    ) -> Result<(), IndexError> {
        if std::mem::replace(&mut self.limbo.borrow_mut().is_in_step, true) {
            return Ok(());
        }
        let stepped = self.step_alone(session, lane, counters).await;
        self.limbo.borrow_mut().is_in_step = false;
        stepped
    }

    async fn step_alone<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        lane: u16,
        counters: &Counters,
    ) -> Result<(), IndexError> {
        let snapshot = self.limbo.borrow_mut().snapshot.take();
        let mut snapshot = match snapshot {
            Some(snapshot) => snapshot,
            None => {
                let units = std::mem::take(&mut self.limbo.borrow_mut().added);
                if units.is_empty() {
                    return Ok(());
                }
                match session.holders().await {
                    Ok(holders) => Snapshot { units, holders },
                    Err(error) => {
                        self.limbo.borrow_mut().added.extend(units);
                        return Err(error);
                    }
                }
            }
        };
        let advanced = session.advanced(&mut snapshot.holders, lane).await;
        if advanced.is_err() || !snapshot.holders.is_empty() && !mutants::REUSED_BEFORE_EPOCH.is_on() {
            self.limbo.borrow_mut().snapshot = Some(snapshot);
            return advanced.map(drop);
        }
        let mut units = snapshot.units;
        while !units.is_empty() {
            let batch = units.split_off(units.len().saturating_sub(CAS_PER_CHAIN));
            if let Err(error) = self.free(session, &batch, counters).await {
                // Some of the batch may be free already. A CAS frees each once.
                units.extend(batch);
                let holders = Vec::new();
                self.limbo.borrow_mut().snapshot = Some(Snapshot { units, holders });
                return Err(error);
            }
        }
        Ok(())
    }

    /// Frees units that `sweep` has found. Returns the number of those that were not freed by others.
    pub(in crate::index) async fn free_leaked<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        units: impl Iterator<Item = (Far, Class, u32)>,
        counters: &Counters,
    ) -> Result<u64, IndexError> {
        let units: Vec<Retired> =
            units.map(|(at, class, generation)| Retired { at, class, generation }).collect();
        let mut freed = 0;
        for batch in units.chunks(CAS_PER_CHAIN) {
            freed += self.free(session, batch, counters).await?;
        }
        Ok(freed)
    }

    /// Frees units that no operation can reach any more. Returns the number of those that were not freed before.
    async fn free<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        batch: &[Retired],
        counters: &Counters,
    ) -> Result<u64, IndexError> {
        let (layout, mut freed) = (&session.layout, 0);
        for (member, table) in layout.members.iter().enumerate() {
            let units: Vec<(Chunk, u64, [U64; 2])> = batch
                .iter()
                .filter(|unit| unit.at.member() == member)
                .filter_map(|unit| {
                    let (chunk, number) = layout.unit_at(unit.at, unit.class)?;
                    let taken = State { generation: unit.generation, is_taken: true };
                    let free = State { generation: unit.generation.wrapping_add(1), is_taken: false };
                    Some((chunk, number, [taken, free].map(|state| U64::new(state.word()))))
                })
                .collect();
            if units.is_empty() {
                continue;
            }
            let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
            let mut chain = buffer.begin(table.key());
            for (chunk, number, [taken, free]) in &units {
                chain.also(cas(Mode::Eq, layout.addr(layout.state(*chunk, *number), 8)?, taken, free));
            }
            session.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            for index in 0..units.len() {
                // Also if the chunk is this client's, it finds the unit by its state, so that it has the unit once.
                if reply.status_at(index) == Some(Status::Ok) {
                    counters.reused.add();
                    freed += 1;
                }
            }
        }
        Ok(freed)
    }
}

//! A bounded queue: a ring of slots. A client fills or empties a slot with one CAS.
//!
//! Each value has a *ticket*: the number of values that were put before it. Ticket t uses slot t mod n in round t / n.
//!
//! ```text
//! table | head u64 | 0 x 56 | tail u64 | 0 x 56 | slot 0 | slot 1 | ... | slot n - 1 |
//! slot  | value address u64 | bytes of the value u32 | round u32 |    16 bytes, aligned; no address while empty
//! ```
//!
//! A PUT takes two round trips:
//! 1. Read the tail.
//! 2. Allocate the value, swing the slot from empty to the value, and advance the tail.
//!
//! A TAKE takes three round trips:
//! 1. Read the head.
//! 2. Read the slot and its value.
//! 3. Swing the slot from that value to empty in the next round, and advance the head.
//!
//! A TAKE from an empty queue ends after the second round trip.
//!
//! Head and tail may lag behind the slots, because a client may fail after it has swung a slot and before it advances
//! the counter. The next client that finds a counter behind advances it (helping). So no client waits for another.
//!
//! Invariant: a slot's word never returns to an earlier value. The slot's round grows by one with every value that
//! leaves the slot (32 bits, wrapping).
//! Invariant: no counter is ahead of the slots. Therefore:
//! * Values are put and taken in the order of their tickets.
//! * If the slot of the next ticket to take has no value at an instant, the queue is empty at that instant.
//! * If the slot of the next ticket to put still has the value of the round before at an instant, the queue is full at
//!   that instant.

use super::{Queue, QueueError};
use crate::ready::run_until_ready;
use crate::store::{self, Members, StoreError, buffer_bytes};
use crate::system::{Family, Footprint, Options, Sizing, SizingError, System};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::mutant::Mutant;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{
    Addr, BoundedPtr, Capabilities, ChainBuf, Fabric, FabricError, Memory, Mode, NodeId, Reply, Status,
    Width, allocate, cas, cas_from, read, read_as, write,
};
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// Kind of the store in the catalog.
pub const KIND: &str = "ring-queue";
/// Length of the longest value, in bytes.
pub const VALUE_MAX: usize = 60 * 1024;

const HEAD_OFFSET: u64 = 0;
const TAIL_OFFSET: u64 = 64;
const SLOTS_OFFSET: u64 = 128;
const SLOT_SIZE: u64 = size_of::<BoundedPtr>() as u64;
/// Number of slots of the largest ring.
const SLOTS_MAX: u64 = 1 << 32;

/// Scratch address of the slot's new word, which a chain builds.
const WORD: Addr = Addr::scratch(0);
const BOUND_AND_ROUND: Addr = Addr::scratch(8);

/// Mutants of the ring queue.
pub mod mutants {
    farside_remote::mutants! {
        /// A take ignores that another take removed the value first.
        TAKEN_TWICE = "QueueTakenTwice";
        /// A put that finds a lagging tail does not advance it and reports a full queue.
        TAIL_LAGS = "QueueTailLags";
        /// A take that finds a lagging head does not advance it and reports an empty queue.
        HEAD_LAGS = "QueueHeadLags";
    }
}

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Spec {
    /// Number of slots of the ring, a power of two.
    slots: u64,
}

/// Location of the ring in the node's memory, and its number of slots.
#[derive(Clone, Copy)]
struct Ring {
    slots: u64,
    extent: Extent,
}

impl Ring {
    fn new(parameters: &str, extent: Extent) -> Result<Ring, String> {
        let Spec { slots } = serde_json::from_str(parameters)
            .map_err(|error| format!("invalid ring description in the catalog: {error}"))?;
        let fits = table_len(slots).is_some_and(|len| len <= extent.len);
        if !slots.is_power_of_two() || !fits || extent.at.checked_add(extent.len).is_none() {
            return Err(format!(
                "invalid ring description in the catalog: {slots} slots in {} bytes",
                extent.len
            ));
        }
        Ok(Ring { slots, extent })
    }

    fn counter(&self, offset: u64) -> Addr {
        Addr::new(self.extent.at + offset)
    }

    fn slot(&self, ticket: u64) -> Addr {
        Addr::new(self.extent.at + SLOTS_OFFSET + ticket % self.slots * SLOT_SIZE)
    }

    /// Returns the round in which the slot holds the ticket's value, modulo 2^32.
    fn round(&self, ticket: u64) -> u32 {
        (ticket / self.slots) as u32
    }

    /// Returns the word of the ticket's slot before the ticket's value is put.
    fn empty(&self, ticket: u64) -> BoundedPtr {
        BoundedPtr { tag: self.round(ticket).into(), ..BoundedPtr::default() }
    }
}

fn table_len(slots: u64) -> Option<u64> {
    slots.checked_mul(SLOT_SIZE)?.checked_add(SLOTS_OFFSET)
}

/// State of a slot, relative to a ticket that uses it.
enum SlotState {
    /// The value of the ticket was not yet put.
    Empty,
    /// The slot holds the value of the ticket.
    Filled,
    /// The value of the ticket was taken.
    Passed,
    /// The slot still holds the value of the round before.
    Before,
}

fn slot_state(ring: &Ring, ticket: u64, word: BoundedPtr) -> Result<SlotState, QueueError> {
    let ahead = word.tag.get().wrapping_sub(ring.round(ticket)) as i32;
    match (ahead, word.ptr.is_null()) {
        (0, true) => Ok(SlotState::Empty),
        (0, false) => Ok(SlotState::Filled),
        (1.., _) => Ok(SlotState::Passed),
        (-1, false) => Ok(SlotState::Before),
        _ => Err(QueueError::Damaged("a slot and a counter that do not match")),
    }
}

/// Client of one queue. It runs one operation at a time: give each task its own client.
pub struct RingQueue<F> {
    fabric: F,
    node: NodeId,
    ring: Ring,
    chain: ChainBuf,
    reply: Reply,
    /// Reply with the value that was taken last.
    value: Reply,
}

impl<F: Fabric + Clock> RingQueue<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<RingQueue<F>, StoreError> {
        store::open::<RingQueueKind, F>(fabric, node, name).await
    }

    /// Reads a counter, the head or the tail, which lies `offset` bytes after the start of the table.
    async fn counter(&mut self, offset: u64) -> Result<u64, QueueError> {
        let mut chain = self.chain.begin(self.ring.extent.key);
        let counter = chain.also(read_as::<U64>(self.ring.counter(offset)));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(of_read)?;
        self.reply.get(counter).map(|counter| counter.get()).map_err(QueueError::Refused)
    }

    /// Advances a counter that lags at `ticket`, unless another client has already advanced it. Returns the next
    /// ticket to try.
    #[cold]
    async fn advance(&mut self, offset: u64, ticket: u64) -> Result<u64, QueueError> {
        let mut chain = self.chain.begin(self.ring.extent.key);
        let next = ticket.wrapping_add(1);
        let (old, new) = (U64::new(ticket), U64::new(next));
        let counter = chain.also(cas(Mode::Eq, self.ring.counter(offset), &old, &new));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(of_read)?;
        let found = self.reply.get(counter).map_err(QueueError::Refused)?.get();
        Ok(if found.wrapping_sub(next) as i64 > 0 { found } else { next })
    }
}

impl<F: Fabric + Clock> Queue for RingQueue<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    async fn put(&mut self, value: &[u8]) -> Result<bool, QueueError> {
        let class = Class::for_len(value.len()).filter(|_| value.len() <= VALUE_MAX);
        let list = class.ok_or(QueueError::Length { len: value.len(), max: VALUE_MAX })?.list();
        let mut ticket = self.counter(TAIL_OFFSET).await?;
        loop {
            let (at, empty) = (self.ring.slot(ticket), self.ring.empty(ticket));
            let bound_and_round = [(value.len() as u32).to_le_bytes(), self.ring.round(ticket).to_le_bytes()];
            let (old, new) = (U64::new(ticket), U64::new(ticket.wrapping_add(1)));
            let mut chain = self.chain.begin(self.ring.extent.key);
            chain.also(write(BOUND_AND_ROUND, bound_and_round.as_bytes()));
            chain.then(allocate(list, [value, &[], &[]]).redirect(WORD));
            let swung = chain.then(cas_from::<BoundedPtr>(at, &empty, WORD).reclaiming(0));
            chain.then(cas(Mode::Eq, self.ring.counter(TAIL_OFFSET), &old, &new));
            let ready = run_until_ready(&self.fabric, self.node, &chain, &mut self.reply).await;
            if !ready.map_err(of_swing)? {
                return Err(QueueError::OutOfMemory);
            }
            let found = match self.reply.status(swung) {
                Status::Ok => return Ok(true),
                Status::CasFailed => *self.reply.get(swung).map_err(QueueError::Refused)?,
                _ => return Err(QueueError::Refused(self.reply.verdict())),
            };
            match slot_state(&self.ring, ticket, found)? {
                SlotState::Before => return Ok(false),
                SlotState::Empty => return Err(QueueError::Damaged("an empty slot that has bytes")),
                _ if mutants::TAIL_LAGS.is_on() => return Ok(false),
                // Another put was faster, or its client failed before it advanced the tail.
                _ => ticket = self.advance(TAIL_OFFSET, ticket).await?,
            }
        }
    }

    async fn take(&mut self) -> Result<Option<&[u8]>, QueueError> {
        let mut ticket = self.counter(HEAD_OFFSET).await?;
        let value = loop {
            let at = self.ring.slot(ticket);
            let mut chain = self.chain.begin(self.ring.extent.key);
            chain.also(read(at, SLOT_SIZE as u32).redirect(WORD));
            let word = chain.then(read_as::<BoundedPtr>(WORD));
            let value = chain.then(read(WORD, VALUE_MAX as u32).indirect().bounded());
            self.fabric.run(self.node, &chain, &mut self.value).await.map_err(of_read)?;
            let refused = |_| QueueError::Refused(self.value.verdict());
            let word = *self.value.get(word).map_err(refused)?;
            match slot_state(&self.ring, ticket, word)? {
                SlotState::Empty => return Ok(None),
                SlotState::Passed if mutants::HEAD_LAGS.is_on() => return Ok(None),
                // Another take was faster, or its client failed before it advanced the head.
                SlotState::Passed => ticket = self.advance(HEAD_OFFSET, ticket).await?,
                SlotState::Before => return Err(QueueError::Damaged("a head that is ahead of the slots")),
                SlotState::Filled => {
                    self.value.get(value).map_err(refused)?;
                    if self.empty_slot(ticket, word).await? {
                        break value;
                    }
                }
            }
        };
        self.value.get(value).map(Some).map_err(QueueError::Refused)
    }
}

impl<F: Fabric + Clock> RingQueue<F> {
    /// Swings a ticket's slot from its value to empty in the next round. Returns false if another take was faster.
    async fn empty_slot(&mut self, ticket: u64, word: BoundedPtr) -> Result<bool, QueueError> {
        let at = self.ring.slot(ticket);
        let empty = self.ring.empty(ticket.wrapping_add(self.ring.slots));
        let (old, new) = (U64::new(ticket), U64::new(ticket.wrapping_add(1)));
        let mut chain = self.chain.begin(self.ring.extent.key);
        let swung = chain.also(cas(Mode::Eq, at, &word, &empty).reclaiming(0));
        chain.then(cas(Mode::Eq, self.ring.counter(HEAD_OFFSET), &old, &new));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(of_swing)?;
        match self.reply.status(swung) {
            Status::Ok => Ok(true),
            Status::CasFailed => Ok(mutants::TAKEN_TWICE.is_on()),
            refused => Err(QueueError::Refused(refused)),
        }
    }
}

/// Returns the error of a chain that only reads. Whether or not the chain ran, the operation was not carried out.
fn of_read(error: FabricError) -> QueueError {
    QueueError::Fabric(error.map_ran(|_| Ran::No))
}

/// Returns the error of a chain that swings a slot. Even if the chain ran, its CAS may have failed, so the outcome is
/// unknown.
fn of_swing(error: FabricError) -> QueueError {
    QueueError::Fabric(error.map_ran(|ran| if ran == Ran::No { Ran::No } else { Ran::Unknown }))
}

/// Returns the number of slots for the items, or `None` if the largest ring has fewer slots.
fn slots_for(sizing: &Sizing) -> Option<u64> {
    sizing.items.unwrap_or(1).checked_next_power_of_two().filter(|&slots| slots <= SLOTS_MAX)
}

/// Node-side half of the ring queue.
pub struct RingQueueKind;

impl System for RingQueueKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "ring queue";
    const SUMMARY: &'static str = "put and take are two chains each";
    const FAMILY: Family = Family::Queue;
    const NEEDS: Capabilities = Capabilities::CONDITIONAL_OPS;
    const FOR_TESTS: bool = true;
    const MUTANTS: &'static [Mutant] = mutants::ALL;

    type Client<F: Fabric + Clock> = RingQueue<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::json!({ "slots": slots_for(sizing).unwrap_or(SLOTS_MAX) }).to_string()
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        if sizing.value_len > VALUE_MAX {
            return Err(SizingError::Value(VALUE_MAX));
        }
        let (slots, item_bytes) =
            (slots_for(sizing).ok_or(SizingError::Items)?, buffer_bytes(sizing.value_len));
        Ok(Footprint { slots, table_bytes: table_len(slots).ok_or(SizingError::Items)?, item_bytes })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(RingQueueKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<RingQueue<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        let ring = Ring::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
        Ok(RingQueue { fabric, node, ring, chain: ChainBuf::new(), reply: Reply::new(), value: Reply::new() })
    }
}

impl<M: Memory> Kind<M> for RingQueueKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        let wrong = |error: &dyn std::fmt::Display| {
            format!("a {KIND} store takes {{\"slots\": N}}, a power of two up to {SLOTS_MAX}: {error}")
        };
        let Spec { slots } = serde_json::from_str(parameters).map_err(|error| wrong(&error))?;
        let sound = slots.is_power_of_two() && slots <= SLOTS_MAX;
        let table_len = table_len(slots).filter(|_| sound).ok_or_else(|| wrong(&slots))?;
        Ok(Plan { table_len, parameters: parameters.into(), wide: false })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Ring::new(parameters, table)?))
    }
}

impl<M: Memory> Service<M> for Ring {
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        const PER_STEP: u64 = 16;
        let next = (cursor + PER_STEP).min(self.slots);
        for slot in cursor..next {
            let word = memory.load(self.slot(slot).raw(), Width::W16)?;
            let word = BoundedPtr::read_from_bytes(&word.to_le_bytes()).expect("a slot's size");
            if !word.ptr.is_null() {
                found.push(word.ptr.raw());
            }
        }
        Ok((next < self.slots).then_some(next))
    }
}

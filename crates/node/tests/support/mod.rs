//! A node and clients that a test steps by hand: each test chooses the order of events.
//!
//! Invariant: nothing here waits or runs concurrently with the test, so failures are deterministic.

#![allow(dead_code, reason = "each test file uses a part of this")]

pub(crate) mod cases;
pub(crate) mod keeper;
pub(crate) mod quiescence;

use farside_fabrics::memory::{Mapping, Pages};
use farside_node::identity::Sender;
use farside_node::{Node, Progress};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::reuse::Retirees;
use farside_remote::arena::session::{SessionId, epoch_at, turn_at};
use farside_remote::arena::state::{Stage, State};
use farside_remote::arena::{Arena, Buffer, header};
use farside_remote::control::{Answer, Ask, NodeInfo, Store, StoreStat};
use farside_remote::leases::{ENTRY_SIZE, LeaseTable};
use farside_remote::service::{Extent, Kind, Plan, Rebuild, Service, Step};
use farside_remote::{By, Memory, Width};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The class of almost all buffers in the tests, with 15 buffers per segment, so that a segment is soon full.
pub(crate) const LARGE: u8 = 40;
/// Number of a class of which a segment holds 18 buffers.
pub(crate) const MEDIUM: u8 = 39;

pub(crate) fn class(index: u8) -> &'static Class {
    Class::get(index).expect("a class")
}

/// A kind of store with the simplest structure: a table of addresses. A store's parameters are its number of slots,
/// with a leading `+` if the store is wide.
#[derive(Clone, Default)]
pub(crate) struct Slots {
    /// Number of calls of `live`, with which the node searches for reachable buffers.
    pub(crate) looks: Arc<AtomicU64>,
    /// Number of entries of the table of leases behind the slots; 0 if there is no such table.
    pub(crate) ids: u16,
    /// Whether sessions may reuse the buffers that they retire, and whether tables can be rebuilt.
    pub(crate) reuses: bool,
    /// Number of steps of surveys, each of which reads the items behind the slots.
    pub(crate) surveyed: Arc<AtomicU64>,
}

/// Number of slots that one step reads.
pub(crate) const SLOTS_PER_LOOK: u64 = 16;

impl<M: Memory> Kind<M> for Slots {
    fn name(&self) -> &'static str {
        "slots"
    }

    fn permits_reuse(&self) -> bool {
        self.reuses
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        let slots: u64 = parameters.parse().map_err(|_| "give the number of slots".to_owned())?;
        Ok(Plan {
            table_len: slots * 8 + u64::from(self.ids) * ENTRY_SIZE,
            parameters: parameters.to_owned(),
            wide: parameters.starts_with('+'),
        })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        let slots = parameters.parse().map_err(|_| "give the number of slots".to_owned())?;
        Ok(Box::new(SlotsService { at: table.at, slots, kind: self.clone() }))
    }
}

struct SlotsService {
    at: u64,
    slots: u64,
    kind: Slots,
}

impl<M: Memory> Service<M> for SlotsService {
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        let count = SLOTS_PER_LOOK.min(self.slots - cursor);
        let mut bytes = [0; SLOTS_PER_LOOK as usize * 8];
        let bytes = &mut bytes[..count as usize * 8];
        memory.read(self.at + cursor * 8, bytes)?;
        let slots = bytes.chunks_exact(8).map(|slot| u64::from_le_bytes(slot.try_into().expect("8 bytes")));
        found.extend(slots.filter(|&at| at != 0));
        self.kind.looks.fetch_add(1, Ordering::Relaxed);
        Ok((cursor + count < self.slots).then_some(cursor + count))
    }

    fn leases(&self) -> Option<LeaseTable> {
        let ids = self.kind.ids;
        (ids > 0).then_some(LeaseTable { at: self.at + self.slots * 8, ids })
    }

    fn rebuild(&mut self) -> Option<&mut dyn Rebuild<M>> {
        if self.kind.reuses { Some(self) } else { None }
    }
}

/// A rebuild that reads all items, and finds that the table is large enough.
impl<M: Memory> Rebuild<M> for SlotsService {
    fn survey(&mut self, _parameters: &str, _quota: u64, _entropy: u64) -> Result<(), String> {
        Ok(())
    }

    fn step(&mut self, memory: &M, _dropped: &mut Vec<u64>) -> Result<Step, M::Wait> {
        let slot = self.kind.surveyed.load(Ordering::Relaxed) % self.slots;
        let at = memory.load(self.at + slot * 8, Width::W8)? as u64;
        if at != 0 {
            memory.load(at, Width::W8)?;
        }
        self.kind.surveyed.fetch_add(1, Ordering::Relaxed);
        Ok(if slot + 1 < self.slots { Step::Made } else { Step::Content })
    }
}

/// A node with its memory, and one store called `s`.
pub(crate) struct Home {
    pub(crate) memory: Arc<Mapping>,
    pub(crate) node: Node<Mapping>,
    pub(crate) kind: Slots,
    pub(crate) store: Store,
    next_pid: u32,
}

/// Maximum number of steps until the node is idle, which no correct test reaches.
const STEPS_MAX: u32 = 400_000;

impl Home {
    /// Creates a node with 14 segments. The store has one segment for its table, four for buffers and one in reserve.
    pub(crate) fn new() -> Home {
        Home::of(16, 5)
    }

    /// Creates a node with a memory of `memory_mib` MiB, and a store with a quota of `quota_mib` MiB.
    pub(crate) fn of(memory_mib: u64, quota_mib: u64) -> Home {
        Home::with(memory_mib, quota_mib, Slots::default())
    }

    /// Creates a node as [`Home::new`] does. Its stores have tables of leases with `ids` entries.
    pub(crate) fn leased(ids: u16) -> Home {
        Home::with(16, 5, Slots { ids, ..Slots::default() })
    }

    /// Creates a node with a memory of `memory_mib` MiB, and a store with a quota of `quota_mib` MiB, in which sessions
    /// reuse the buffers that they retire.
    pub(crate) fn reusing(memory_mib: u64, quota_mib: u64) -> Home {
        let mut home = Home::with(memory_mib, quota_mib, Slots { reuses: true, ..Slots::default() });
        home.poll_shared();
        home
    }

    fn with(memory_mib: u64, quota_mib: u64, kind: Slots) -> Home {
        let memory = Arc::new(Mapping::create(memory_mib << 20, Pages::Small).expect("memory"));
        let node = Node::new(&*memory, vec![Box::new(kind.clone())], NodeInfo::default());
        let store = Store {
            name: String::new(),
            kind: String::new(),
            parameters: String::new(),
            quota: 0,
            incarnation: 0,
            region: 0,
            secret: 0,
            table_at: 0,
            table_len: 0,
            wide: false,
            created: 0,
            id: 0,
            former: None,
            membership: None,
        };
        let mut home = Home { memory, node, kind, store, next_pid: 1001 };
        home.store = home.create("s", quota_mib);
        home
    }

    pub(crate) fn create(&mut self, name: &str, mib: u64) -> Store {
        let ask = Ask::CreateStore {
            name: name.into(),
            kind: "slots".into(),
            parameters: "32".into(),
            quota: mib << 20,
        };
        match self.ask(ask) {
            Some(Answer::Store(store)) => store,
            other => panic!("asked for a store, got {other:?}"),
        }
    }

    /// Sends a request, and steps the node until there is nothing to do. Returns `None` if there is no response yet.
    pub(crate) fn ask(&mut self, ask: Ask) -> Option<Answer> {
        let ticket = self.node.ask(ask, [7, 0x5ec2_e700]);
        self.idle();
        let (to, answer) = self.node.answer()?;
        assert_eq!(to, ticket, "responses come in the order of the requests");
        Some(answer.unwrap_or_else(|refusal| panic!("refused: {refusal}")))
    }

    /// Sends a request of a session, and steps the node until there is nothing to do. Returns `None` if there is no
    /// response yet.
    pub(crate) fn ask_from(&mut self, sender: Sender, ask: Ask) -> Option<Result<Answer, String>> {
        let ticket = self.node.ask_from(sender, ask, [7, 0x5ec2_e700]);
        self.idle();
        let (to, answer) = self.node.answer()?;
        assert_eq!(to, ticket, "responses come in the order of the requests");
        Some(answer)
    }

    /// Binds a session to a nonce of the store `s`.
    pub(crate) fn bind(&mut self, sender: Sender, nonce: u64) -> Result<Answer, String> {
        let ask = Ask::Bind { name: "s".into(), id: self.store.id, client: nonce as u32, nonce };
        self.ask_from(sender, ask).expect("a binding is answered at once")
    }

    /// Fences the client of the store `s` with this nonce. Returns `None` if there is no response yet.
    pub(crate) fn fence(&mut self, nonce: u64) -> Option<Result<Answer, String>> {
        self.ask_from(Sender::Host, Ask::Fence { name: "s".into(), id: self.store.id, nonce })
    }

    pub(crate) fn scan(&mut self) -> Option<Answer> {
        self.ask(Ask::Scan { name: "s".into() })
    }

    pub(crate) fn stat(&mut self) -> StoreStat {
        match self.ask(Ask::StoreStat { name: "s".into() }) {
            Some(Answer::StoreStat(stat)) => stat,
            other => panic!("asked for figures, got {other:?}"),
        }
    }

    pub(crate) fn step(&mut self) -> Progress {
        let Ok(progress) = self.node.step(&self.memory);
        progress
    }

    /// Lets another node take over the memory.
    pub(crate) fn succeed(&mut self) {
        let kinds: Vec<Box<dyn Kind<Mapping>>> = vec![Box::new(self.kind.clone())];
        let Ok(restored) = Node::restore(&*self.memory, kinds, NodeInfo::default());
        self.node = restored.expect("the memory can be served");
        while self.node.recover_step(&self.memory) == Ok(Ok(false)) {}
    }

    /// Steps the node until there is nothing to do.
    pub(crate) fn idle(&mut self) {
        for _ in 0..STEPS_MAX {
            if self.step() == Progress::Idle {
                return;
            }
        }
        panic!("the node is not idle after {STEPS_MAX} steps");
    }

    /// Writes an entry of the table of leases of the store `s`.
    pub(crate) fn lease(&self, index: u16, nonce: u64, epoch: u64) {
        let slots: u64 = self.store.parameters.parse().expect("a number");
        let at = self.store.table_at + slots * 8 + u64::from(index) * ENTRY_SIZE;
        let entry = [nonce.to_le_bytes(), [0; 8], epoch.to_be_bytes(), [0; 8]].concat();
        let Ok(()) = self.memory.write(at, &entry);
    }

    /// Runs the node's periodic check, which takes retired buffers, and steps the node until there is nothing to do.
    pub(crate) fn poll_shared(&mut self) {
        self.node.poll_shared();
        self.idle();
    }

    /// Adds a client of the store `s`, with its own pid.
    pub(crate) fn client(&mut self) -> Client {
        let pid = self.next_pid;
        self.next_pid += 1;
        let Ok(opened) = self.node.open_session(&self.memory, pid, 1);
        let id = opened.expect("a session is free");
        Client { memory: Arc::clone(&self.memory), store: self.store.clone(), id, pid, turn: Cell::new(0) }
    }

    /// Ends a client's session as after the death of the client's process.
    pub(crate) fn kill(&mut self, client: &Client) {
        self.node.end_session(client.id, false);
    }

    /// Ends a client's session cleanly.
    pub(crate) fn part(&mut self, client: &Client) {
        self.node.end_session(client.id, true);
    }

    pub(crate) fn state(&self, at: u64) -> State {
        let arena = Arena::of(&*self.memory);
        let Ok(state) = arena.state(&self.buffer(at));
        state
    }

    pub(crate) fn stage(&self, at: u64) -> Stage {
        self.state(at).stage
    }

    pub(crate) fn buffer(&self, at: u64) -> Buffer {
        let Ok(found) = Arena::of(&*self.memory).buffer_at(at);
        found.unwrap_or_else(|| panic!("{at:#x} is not a buffer")).1
    }

    /// Changes a buffer's state, as a peer that corrupts memory can.
    pub(crate) fn damage_state(&self, at: u64, damage: impl FnOnce(State) -> State) {
        let state = self.state(at);
        let Ok(changed) = Arena::of(&*self.memory).exchange_state(&self.buffer(at), state, damage(state));
        assert!(changed, "no other process changes it");
    }
}

/// A client that the test steps by hand. The client may stay in a turn for any time.
pub(crate) struct Client {
    memory: Arc<Mapping>,
    pub(crate) store: Store,
    pub(crate) id: SessionId,
    pub(crate) pid: u32,
    turn: Cell<u64>,
}

impl Client {
    /// Begins a turn, in which the client may hold pointers.
    pub(crate) fn begin_turn(&self) {
        assert!(self.turn.get().is_multiple_of(2), "it is in a turn already");
        self.set_turn(self.turn.get() + 1);
    }

    /// Ends the turn, after which the client holds no pointers.
    pub(crate) fn end_turn(&self) {
        assert!(!self.turn.get().is_multiple_of(2), "it is not in a turn");
        self.set_turn(self.turn.get() + 1);
    }

    fn set_turn(&self, turn: u64) {
        self.turn.set(turn);
        let Ok(epoch) = self.memory.load(header::EPOCH_AT, Width::W8);
        let Ok(()) = self.memory.write(epoch_at(self.id.slot), &(epoch as u64).to_le_bytes());
        let Ok(()) = self.memory.write(turn_at(self.id.slot), &turn.to_le_bytes());
    }

    /// Runs `what` within a turn of the client.
    pub(crate) fn in_turn<T>(&self, what: impl FnOnce(&Client) -> T) -> T {
        self.begin_turn();
        let done = what(self);
        self.end_turn();
        done
    }

    pub(crate) fn take(&self) -> u64 {
        self.take_of(LARGE)
    }

    pub(crate) fn take_of(&self, index: u8) -> u64 {
        let (region, owner) = (self.store.region, self.id.number);
        let Ok(taken) = Arena::of(&*self.memory).take(region, class(index), Supply::Quota, owner);
        taken.expect("there is a buffer")
    }

    /// Takes a buffer, unless there is none.
    pub(crate) fn try_take(&self) -> Option<u64> {
        let (region, owner) = (self.store.region, self.id.number);
        let Ok(taken) = Arena::of(&*self.memory).take(region, class(LARGE), Supply::Quota, owner);
        taken.ok()
    }

    /// Takes a buffer that the client has retired, if one is past its grace.
    pub(crate) fn retake(&self) -> Option<u64> {
        let Ok(taken) = Arena::of(&*self.memory).reuse(By::itself(self.id), self.store.region, class(LARGE));
        taken
    }

    /// Does `what` as a client of another store.
    pub(crate) fn store_of(&self, store: &Store, what: impl FnOnce(&Client)) {
        let (memory, store, id) = (Arc::clone(&self.memory), store.clone(), self.id);
        what(&Client { memory, store, id, pid: self.pid, turn: self.turn.clone() });
    }

    /// Tries to take a buffer that the client has retired, in as many turns as its grace needs and some more.
    pub(crate) fn retake_in_turns(&self) -> Option<u64> {
        (0..6).find_map(|_| self.in_turn(Client::retake))
    }

    /// Takes a buffer and retires it in one turn, and takes it again in others. Returns the buffer, or `None` if the
    /// client does not get it again.
    pub(crate) fn reuse_one(&self) -> Option<u64> {
        let at = self.in_turn(|client| {
            let at = client.take();
            assert!(client.retire(at));
            at
        });
        let again = self.retake_in_turns()?;
        assert_eq!(again, at, "it was the only one");
        Some(again)
    }

    /// Stores a buffer's address in slot `slot`. Returns the old pointer.
    pub(crate) fn install(&self, slot: u64, at: u64) -> u64 {
        let slot_at = self.store.table_at + slot * 8;
        let Ok(old) = self.memory.load(slot_at, Width::W8);
        let Ok(swapped) = self.memory.exchange(slot_at, Width::W8, old, at.into());
        assert_eq!(swapped, Ok(()), "no other client changes the slot");
        old as u64
    }

    pub(crate) fn retire(&self, at: u64) -> bool {
        self.retire_to(at).is_some()
    }

    /// Retires a buffer, and returns the list that it joined.
    pub(crate) fn retire_to(&self, at: u64) -> Option<Retirees> {
        let Ok(joined) = Arena::of(&*self.memory).retire(self.id, self.store.region, at);
        joined
    }

    /// Retires a buffer that the client has taken and never published, without a chain.
    pub(crate) fn give_back(&self, at: u64) -> bool {
        let Ok(retired) = Arena::of(&*self.memory).retire_own(self.id, self.id.number, self.store.region, at);
        retired.is_some()
    }

    /// Makes the first half of a retirement: makes the buffer RETIRED, but puts it on no list.
    pub(crate) fn begin_to_retire(&self, at: u64) {
        let arena = Arena::of(&*self.memory);
        let Ok(Some((_, buffer))) = arena.buffer_at(at) else { panic!("{at:#x} is not a buffer") };
        let Ok(live) = arena.state(&buffer);
        assert_eq!(live.stage, Stage::Live);
        let retired = State { stage: Stage::Retired, owner: self.id.number, suspect: false, ..live };
        let Ok(changed) = arena.exchange_state(&buffer, live, retired);
        assert!(changed);
    }

    /// Overwrites the head of the client's list of retired buffers, as a peer can.
    pub(crate) fn damage_list(&self, first: u64) {
        self.damage_list_of(Retirees::Node, first);
    }

    /// Overwrites the head of one of the client's lists, as a peer can.
    pub(crate) fn damage_list_of(&self, list: Retirees, first: u64) {
        let Ok(()) = self.memory.write(list_at(self.id.slot, list), &first.to_le_bytes());
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        let Ok(()) = self.memory.write(at, bytes);
    }
}

/// Address of the head of one of a session's lists of retired buffers.
pub(crate) const fn list_at(slot: u32, list: Retirees) -> u64 {
    turn_at(slot) + 64 + 16 * list as u64
}

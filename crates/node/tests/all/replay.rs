//! Every step of the node can be replayed. A memory returns *wait* for each new access and records the access's result.
//! A step must repeat the same accesses however often it is restarted, and change nothing until it has all results.

use crate::support::Slots;
use farside_fabrics::memory::{Mapping, Pages};
use farside_node::{Node, NodeMemory, Progress};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::session::{SessionId, turn_at};
use farside_remote::arena::{Arena, Geometry};
use farside_remote::control::{Answer, Ask, NodeInfo, Store};
use farside_remote::leases::ENTRY_SIZE;
use farside_remote::{Key, Memory, Rights, Width};
use std::cell::{Cell, RefCell};

/// One access to the memory, with its result.
#[derive(Clone, Debug, PartialEq)]
enum Access {
    Read(u64, Vec<u8>),
    Write(u64, Vec<u8>),
    Load(u64, u128),
    Exchange(u64, u128, u128, Result<(), u128>),
    Discard(u32),
}

/// The error of an access that this attempt is the first to make: the step must be restarted.
#[derive(Debug)]
struct Wait;

struct Replayed {
    mapping: Mapping,
    recorded: RefCell<Vec<Access>>,
    /// Number of recorded accesses that this attempt has repeated so far.
    again: Cell<usize>,
    /// Whether accesses complete at once and are not recorded.
    at_once: Cell<bool>,
}

impl Replayed {
    /// Returns the recorded result, if the record is of this access. If there is no record, performs the access and
    /// waits.
    fn ask(
        &self,
        matches: impl Fn(&Access) -> bool,
        perform: impl FnOnce() -> Access,
    ) -> Result<Access, Wait> {
        if self.at_once.get() {
            return Ok(perform());
        }
        let place = self.again.replace(self.again.get() + 1);
        if let Some(recorded) = self.recorded.borrow().get(place) {
            assert!(matches(recorded), "access {place} was {recorded:?} before, and is another now");
            return Ok(recorded.clone());
        }
        self.recorded.borrow_mut().push(perform());
        Err(Wait)
    }

    /// Makes one step of the node, with as many attempts as needed. Returns the step's outcome and its number of
    /// accesses.
    fn step(&self, node: &mut Node<Replayed>) -> (Progress, usize) {
        loop {
            self.again.set(0);
            if let Ok(progress) = node.step(self) {
                let accesses = self.recorded.take().len();
                assert_eq!(self.again.get(), accesses, "an attempt made fewer accesses than before");
                return (progress, accesses);
            }
        }
    }

    fn now<T>(&self, what: impl FnOnce(&Replayed) -> Result<T, Wait>) -> T {
        self.at_once.set(true);
        let done = what(self).expect("it answers at once");
        self.at_once.set(false);
        done
    }
}

impl Memory for Replayed {
    type Wait = Wait;

    fn geometry(&self) -> Geometry {
        self.mapping.geometry()
    }
    fn admits(&self, key: Key) -> Result<Rights, Wait> {
        Arena::of(self).admits(key)
    }
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Wait> {
        Arena::of(self).reach(region, at, len)
    }
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Wait> {
        let len = out.len();
        let matches =
            |recorded: &Access| matches!(recorded, Access::Read(a, bytes) if (*a, bytes.len()) == (at, len));
        let recorded = self.ask(matches, || {
            let mut bytes = vec![0; out.len()];
            let Ok(()) = self.mapping.read(at, &mut bytes);
            Access::Read(at, bytes)
        })?;
        let Access::Read(_, bytes) = recorded else { unreachable!("it matches") };
        out.copy_from_slice(&bytes);
        Ok(())
    }
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Wait> {
        let question = Access::Write(at, bytes.to_vec());
        let matches = |recorded: &Access| *recorded == question;
        self.ask(matches, || {
            let Ok(()) = self.mapping.write(at, bytes);
            question.clone()
        })?;
        Ok(())
    }
    fn load(&self, at: u64, width: Width) -> Result<u128, Wait> {
        let matches = |recorded: &Access| matches!(recorded, Access::Load(of, _) if *of == at);
        let recorded = self.ask(matches, || {
            let Ok(word) = self.mapping.load(at, width);
            Access::Load(at, word)
        })?;
        let Access::Load(_, word) = recorded else { unreachable!("it matches") };
        Ok(word)
    }
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Wait> {
        let expected = (at, old, new);
        let matches =
            |recorded: &Access| matches!(recorded, Access::Exchange(a, b, c, _) if (*a, *b, *c) == expected);
        let recorded = self.ask(matches, || {
            let Ok(answer) = self.mapping.exchange(at, width, old, new);
            Access::Exchange(at, old, new, answer)
        })?;
        let Access::Exchange(.., answer) = recorded else { unreachable!("it matches") };
        Ok(answer)
    }
}

impl NodeMemory for Replayed {
    fn discard(&self, index: u32) -> Result<(), Wait> {
        let matches = |recorded: &Access| *recorded == Access::Discard(index);
        self.ask(matches, || {
            let Ok(()) = NodeMemory::discard(&self.mapping, index);
            Access::Discard(index)
        })?;
        Ok(())
    }
}

/// A node on the replaying memory, and the maximum number of accesses in one of its steps.
struct Home {
    memory: Replayed,
    node: Node<Replayed>,
    most: usize,
    replayed: usize,
}

impl Home {
    fn idle(&mut self) {
        loop {
            let (progress, accesses) = self.memory.step(&mut self.node);
            self.most = self.most.max(accesses);
            self.replayed += accesses;
            if progress == Progress::Idle {
                return;
            }
        }
    }

    fn ask(&mut self, ask: Ask) -> Answer {
        self.node.ask(ask, [7, 7]);
        self.idle();
        self.node.answer().expect("no client is in a turn").1.expect("not refused")
    }

    fn create(&mut self, name: &str, mib: u64) -> Store {
        let (name, kind, parameters) = (name.into(), "slots".into(), "32".into());
        match self.ask(Ask::CreateStore { name, kind, parameters, quota: mib << 20 }) {
            Answer::Store(store) => store,
            other => panic!("asked for a store, got {other:?}"),
        }
    }

    fn session(&mut self) -> SessionId {
        let opened = self.memory.now(|_| self.node.open_session(&self.memory, 1, 1));
        opened.expect("a session is free")
    }

    fn turn(&self, id: SessionId, turn: u64) {
        self.memory.now(|memory| memory.write(turn_at(id.slot), &turn.to_le_bytes()));
    }
}

#[test]
fn every_step_asks_the_same_when_it_is_begun_anew() {
    replay(0);
}

#[test]
fn every_step_of_a_store_with_leases_asks_the_same_when_it_is_begun_anew() {
    replay(19);
}

/// Replays every step of a node whose stores have tables of leases with `ids` entries, or have none.
fn replay(ids: u16) {
    let memory = Replayed {
        mapping: Mapping::create(24 << 20, Pages::Small).expect("memory"),
        recorded: RefCell::default(),
        again: Cell::new(0),
        at_once: Cell::new(false),
    };
    let node = Node::new(&memory, vec![Box::new(Slots { ids, ..Slots::default() })], NodeInfo::default());
    let mut home = Home { memory, node, most: 0, replayed: 0 };
    let store = home.create("s", 9);
    let (class, other) = (Class::get(40).expect("a class"), Class::get(39).expect("a class"));
    let (client, second, third) = (home.session(), home.session(), home.session());

    // Take enough buffers to make the store short of memory, then free all of them, while other clients connect and
    // disconnect.
    let take = |home: &Home, class| {
        let taken = home.memory.now(|m| Arena::of(m).take(store.region, class, Supply::Quota, client.number));
        taken.expect("there is a buffer")
    };
    let publish = |home: &Home, epoch: u64| {
        for index in (0..u64::from(ids)).step_by(3) {
            let at = store.table_at + 32 * 8 + index * ENTRY_SIZE;
            let entry = [(index + 1).to_le_bytes(), [0; 8], epoch.to_be_bytes(), [0; 8]].concat();
            home.memory.now(|memory| memory.write(at, &entry));
        }
    };
    publish(&home, 1);
    let retire =
        |home: &Home, at| home.memory.now(|m| Arena::of(m).retire(client, store.region, at)).is_some();
    let all: Vec<u64> = (0..15 * 7).map(|_| take(&home, class)).collect();
    for (&at, slot) in all[..20].iter().zip(0..) {
        home.memory.now(|memory| memory.write(store.table_at + slot * 8, &at.to_le_bytes()));
    }
    assert_eq!(home.ask(Ask::Scan { name: "s".into() }), Answer::Done);
    all[20..].iter().for_each(|&at| assert!(retire(&home, at)));
    [client, second, third].iter().for_each(|&id| home.turn(id, 1));
    home.node.poll_shared();
    home.idle();
    [third, client, second].iter().for_each(|&id| {
        home.turn(id, 2);
        home.idle();
    });
    take(&home, other);
    for epoch in 2..5 {
        publish(&home, epoch);
        home.node.poll_shared();
        home.idle();
    }
    home.node.end_session(second, false);
    home.node.end_session(third, true);
    home.idle();
    let Answer::StoreStat(stat) = home.ask(Ask::StoreStat { name: "s".into() }) else { panic!("figures") };
    assert_eq!((stat.live_buffers, stat.retired_buffers), (21, 0), "{stat:?}");
    assert_eq!(stat.table_bytes + stat.granted_bytes + stat.buffer_segment_bytes, 10 << 20, "{stat:?}");
    home.node.end_session(client, false);
    home.idle();
    let Answer::StoreStat(stat) = home.ask(Ask::StoreStat { name: "s".into() }) else { panic!("figures") };
    assert_eq!(stat.live_buffers, 20, "{stat:?}");
    home.turn(client, 3);
    assert_eq!(home.ask(Ask::DropStore { name: "s".into() }), Answer::Done);
    home.create("s", 18);
    println!("{} accesses, each restarting its step; at most {} in a step", home.replayed, home.most);
    assert!(home.most <= 40, "a step is short");
}

//! Hosts, and what passes between them: datagrams that may be lost, doubled, delayed and overtaken, and connections
//! that bring everything once and in order until they break.
//!
//! Invariant: between two ends of a connection nothing is lost but by its end, of which both hear unless the way is
//! cut. Invariant: what was sent to an address whose owner is gone reaches nobody, not even its next owner.

use crate::fault::{Fault, Struck, Weather, Whom};
use crate::world::{Bell, Nanos, World};
use foldhash::fast::FixedState;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::{Rc, Weak};

/// A machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// Where something can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// At which machine.
    pub host: HostId,
    /// Whose there.
    pub port: u32,
}

/// How far hosts are from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    /// How long a message takes one way, at the least.
    pub delay_ns: Nanos,
    /// How much longer it usually takes, with a heavy tail.
    pub jitter_ns: Nanos,
}

/// What has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Bytes, from there.
    Message(Address, Vec<u8>),
    /// The connection with this one is over.
    HungUp(Address),
}

/// Where what arrives waits for its owner.
pub struct Inbox {
    address: Address,
    arrived: RefCell<VecDeque<Arrival>>,
    bell: Bell,
}

impl Inbox {
    /// Where it is.
    pub fn address(&self) -> Address {
        self.address
    }

    /// What has arrived first and was not taken.
    pub fn take(&self) -> Option<Arrival> {
        self.arrived.borrow_mut().pop_front()
    }

    /// Rung when something has arrived.
    pub fn bell(&self) -> &Bell {
        &self.bell
    }
}

/// What is only looked up, so that its order is of no account.
type Lookup<K, V> = HashMap<K, V, FixedState>;

/// All hosts and the ways between them.
#[derive(Clone)]
pub struct Network(Rc<Inner>);

struct Inner {
    world: World,
    wire: Cell<Wire>,
    weather: Cell<Weather>,
    /// The weather at hosts that have their own.
    local: RefCell<Lookup<HostId, Weather>>,
    struck: Rc<Struck>,
    hosts: Cell<u32>,
    inboxes: RefCell<Lookup<Address, Weak<Inbox>>>,
    next_port: Cell<u32>,
    /// Until when nothing passes from one host to another, and by which fault.
    cuts: RefCell<BTreeMap<(HostId, HostId), (Nanos, Fault)>>,
    /// When the last message between two addresses arrives that may not be overtaken.
    last: RefCell<Lookup<(Address, Address), Nanos>>,
    /// Connections that are open, as whoever connected and whoever was connected to.
    connections: RefCell<BTreeMap<(Address, Address), ()>>,
}

impl Network {
    /// A network without hosts.
    pub fn new(world: &World, wire: Wire, struck: &Rc<Struck>) -> Network {
        Network(Rc::new(Inner {
            world: world.clone(),
            wire: Cell::new(wire),
            weather: Cell::new(Weather::FAIR),
            local: RefCell::default(),
            struck: Rc::clone(struck),
            hosts: Cell::new(0),
            inboxes: RefCell::default(),
            next_port: Cell::new(1 << 16),
            cuts: RefCell::default(),
            last: RefCell::default(),
            connections: RefCell::default(),
        }))
    }

    /// From now on this goes wrong with messages, everywhere.
    pub fn set_weather(&self, weather: Weather) {
        self.0.local.borrow_mut().clear();
        self.0.weather.set(weather);
    }

    /// From now on this goes wrong with messages to that host and from it.
    pub fn set_weather_of(&self, host: HostId, weather: Weather) {
        self.0.local.borrow_mut().insert(host, weather);
    }

    fn weather(&self, from: Address, to: Address) -> Weather {
        let local = self.0.local.borrow();
        let at = |host: HostId| local.get(&host).copied();
        at(from.host).or_else(|| at(to.host)).unwrap_or(self.0.weather.get())
    }

    /// Another host.
    pub fn add_host(&self) -> HostId {
        let host = self.0.hosts.get();
        self.0.hosts.set(host + 1);
        HostId(host)
    }

    /// What arrives at that address from now on, until the answer is dropped.
    ///
    /// # Panics
    /// If somebody has the address.
    pub fn bind(&self, address: Address) -> Rc<Inbox> {
        let inbox = Rc::new(Inbox { address, arrived: RefCell::default(), bell: Bell::default() });
        let before = self.0.inboxes.borrow_mut().insert(address, Rc::downgrade(&inbox));
        assert!(before.is_none_or(|before| before.strong_count() == 0), "{address:?} is somebody's");
        inbox
    }

    /// As [`Network::bind`], at an address of that host which nobody ever had.
    pub fn bind_any(&self, host: HostId) -> Rc<Inbox> {
        let port = self.0.next_port.get();
        self.0.next_port.set(port + 1);
        self.bind(Address { host, port })
    }

    /// Nothing passes from `from` to `to` until then.
    pub fn cut(&self, from: HostId, to: HostId, until: Nanos, fault: Fault) {
        self.0.cuts.borrow_mut().insert((from, to), (until, fault));
    }

    /// Sends a datagram.
    pub fn send(&self, from: Address, to: Address, bytes: Vec<u8>) {
        let Inner { world, struck, .. } = &*self.0;
        let (weather, random, session) = (self.weather(from, to), world.random(), session(from, to));
        if let Some((_, fault)) = self.is_cut(from.host, to.host) {
            return struck.count(fault, session);
        }
        if random.one_in(weather.loss_one_in) {
            return struck.count(Fault::Loss, session);
        }
        if random.one_in(weather.duplicate_one_in) {
            struck.count(Fault::Duplicate, session);
            let late = self.flight() + random.heavy(weather.late_ns);
            self.deliver(world.now() + late, to, Arrival::Message(from, bytes.clone()), None);
        }
        let mut at = world.now() + self.flight();
        if random.one_in(weather.reorder_one_in) {
            struck.count(Fault::Reorder, session);
            at += random.heavy(weather.late_ns);
        } else {
            at = self.in_order(from, to, at, weather);
        }
        self.deliver(at, to, Arrival::Message(from, bytes), None);
    }

    /// Opens a connection from one address to another.
    pub fn connect(&self, from: Address, to: Address) {
        self.0.connections.borrow_mut().insert((from, to), ());
    }

    /// Sends over the connection between these two, whichever of them connected. False if there is none.
    pub fn send_on(&self, from: Address, to: Address, bytes: Vec<u8>) -> bool {
        let Some(connection) = self.connection(from, to) else { return false };
        let Inner { world, struck, .. } = &*self.0;
        let weather = self.weather(from, to);
        if world.random().one_in(weather.reset_one_in) {
            struck.count(Fault::Reset, session(from, to));
            self.hang_up(from, to);
            return false;
        }
        let mut at = world.now() + self.flight();
        if let Some((until, fault)) = self.is_cut(from.host, to.host) {
            struck.count(fault, session(from, to));
            at += until - world.now();
        }
        let at = self.in_order(from, to, at, weather);
        self.deliver(at, to, Arrival::Message(from, bytes), Some(connection));
        true
    }

    /// Ends the connection between these two, if there is one. What is on its way over it is lost; both hear of it.
    pub fn hang_up(&self, from: Address, to: Address) {
        let Some(connection) = self.connection(from, to) else { return };
        self.0.connections.borrow_mut().remove(&connection);
        for (one, other) in [(from, to), (to, from)] {
            let cut = self.is_cut(other.host, one.host).map_or(0, |(until, _)| until - self.0.world.now());
            let at = self.0.world.now() + self.flight() + cut;
            self.deliver(at, one, Arrival::HungUp(other), None);
        }
    }

    /// Ends all connections of an address.
    pub fn hang_up_all(&self, of: Address) {
        let all: Vec<_> = self.0.connections.borrow().keys().copied().collect();
        for (from, to) in all.into_iter().filter(|(from, to)| *from == of || *to == of) {
            self.hang_up(from, to);
        }
    }

    fn connection(&self, one: Address, other: Address) -> Option<(Address, Address)> {
        let connections = self.0.connections.borrow();
        [(one, other), (other, one)].into_iter().find(|pair| connections.contains_key(pair))
    }

    fn flight(&self) -> Nanos {
        let Wire { delay_ns, jitter_ns } = self.0.wire.get();
        delay_ns + if jitter_ns == 0 { 0 } else { self.0.world.random().heavy(jitter_ns) }
    }

    /// When a message arrives that overtakes nothing, and that the weather may delay with all behind it.
    fn in_order(&self, from: Address, to: Address, mut at: Nanos, weather: Weather) -> Nanos {
        let random = self.0.world.random();
        if random.one_in(weather.delay_one_in) {
            self.0.struck.count(Fault::Delay, session(from, to));
            at += random.heavy(weather.late_ns);
        }
        let mut last = self.0.last.borrow_mut();
        let last = last.entry((from, to)).or_default();
        *last = at.max(*last);
        *last
    }

    fn is_cut(&self, from: HostId, to: HostId) -> Option<(Nanos, Fault)> {
        let cut = self.0.cuts.borrow().get(&(from, to)).copied();
        cut.filter(|(until, _)| *until > self.0.world.now())
    }

    /// Has something arrive then, if its address has an owner by then, who need not be the one that it was sent to, and
    /// its connection is still open.
    fn deliver(&self, at: Nanos, to: Address, arrival: Arrival, over: Option<(Address, Address)>) {
        let network = Rc::downgrade(&self.0);
        self.0.world.at(at, move || {
            let Some(network) = network.upgrade() else { return };
            let Some(inbox) = network.inboxes.borrow().get(&to).and_then(Weak::upgrade) else { return };
            if over.is_some_and(|over| !network.connections.borrow().contains_key(&over)) {
                return;
            }
            inbox.arrived.borrow_mut().push_back(arrival);
            inbox.bell.ring();
        });
    }
}

/// What a fault strikes that strikes a message between these.
fn session(from: Address, to: Address) -> Whom {
    Whom::Session(from.host, to.host)
}

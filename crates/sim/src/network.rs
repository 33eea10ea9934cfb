//! Hosts and the messages between them: datagrams that may be lost, duplicated, delayed and reordered, and connections
//! that deliver everything once and in order until they break.
//!
//! Invariant: a connection loses messages only when it ends. Both ends are notified of its end, unless the network is
//! partitioned.
//!
//! Invariant: a message that arrives while its address has no owner is dropped. A later owner of the address never
//! receives it.

use crate::fault::{Fault, FaultRates, Struck, Target};
use crate::world::{Bell, Nanos, World};
use foldhash::fast::FixedState;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::{Rc, Weak};

/// Identifier of a host, a machine of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// Network address to which messages are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Machine of the address.
    pub host: HostId,
    /// Port of the address's owner at that machine.
    pub port: u32,
}

/// Latency of messages between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    /// Minimum one-way latency of a message, in nanoseconds.
    pub delay_ns: Nanos,
    /// Usual additional latency of a message, in nanoseconds, with a heavy tail.
    pub jitter_ns: Nanos,
}

/// Item that has arrived in an inbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A message, with the address of its sender.
    Message(Address, Vec<u8>),
    /// The connection with this address has ended.
    HungUp(Address),
}

/// Event of a packet. Recorded events show where a message was lost.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// Virtual time of the event.
    pub at: Nanos,
    /// Number of the packet, shared by all its events, including those of its duplicate.
    pub packet: u64,
    /// Address of the packet's sender.
    pub from: Address,
    /// Address of the packet's destination.
    pub to: Address,
    /// What happened to the packet.
    pub what: What,
    /// Payload; empty if the packet is not a message.
    pub bytes: &'a [u8],
    /// The verb of a NIC, or its completion, that the packet carries; `None` for packets of processes.
    pub verb: Option<&'static str>,
}

/// Kind of event that happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The packet was sent.
    Send,
    /// The packet is lost by this fault.
    Drop(Fault),
    /// The packet will arrive twice.
    Duplicate,
    /// The packet is delayed by this many nanoseconds.
    Delay(Fault, Nanos),
    /// The packet was delivered.
    Deliver,
    /// The packet was dropped on arrival: the address has no owner any more, or the connection has ended.
    Miss,
    /// The connection has ended. This packet notifies one end of the connection.
    HangUp(Option<Fault>),
}

/// Callback that receives every event of a packet.
type Recorder = Box<dyn FnMut(&Event<'_>)>;

/// Queue of arrivals at an address.
pub struct Inbox {
    address: Address,
    arrived: RefCell<VecDeque<Arrival>>,
    bell: Bell,
}

impl Inbox {
    /// Address whose arrivals the inbox receives.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Removes and returns the oldest arrival, if any.
    pub fn take(&self) -> Option<Arrival> {
        self.arrived.borrow_mut().pop_front()
    }

    /// Bell that rings at each arrival in the inbox.
    pub fn bell(&self) -> &Bell {
        &self.bell
    }
}

/// Map used for lookups only, so that its order cannot influence a run.
type Lookup<K, V> = HashMap<K, V, FixedState>;

/// All hosts and the links between them.
#[derive(Clone)]
pub struct Network(Rc<Inner>);

struct Inner {
    world: World,
    wire: Cell<Wire>,
    rates: Cell<FaultRates>,
    /// Fault rates of the hosts that have rates of their own. All other hosts have the network's rates.
    local: RefCell<Lookup<HostId, FaultRates>>,
    /// Hosts whose next message will be struck by a fault.
    pending: RefCell<Lookup<HostId, Fault>>,
    struck: Rc<Struck>,
    hosts: Cell<u32>,
    inboxes: RefCell<Lookup<Address, Weak<Inbox>>>,
    next_port: Cell<u32>,
    /// Partitions: for each pair of a sending and a receiving host, the time at which the partition ends, and its
    /// fault.
    cuts: RefCell<BTreeMap<(HostId, HostId), (Nanos, Fault)>>,
    /// For each pair of sender and destination, the arrival time of the last message delivered in order.
    last: RefCell<Lookup<(Address, Address), Nanos>>,
    /// Open connections, as pairs of the connecting and the accepting address.
    connections: RefCell<BTreeMap<(Address, Address), ()>>,
    /// Number of packets sent so far. `recorder` is the callback for the packets' events.
    packets: Cell<u64>,
    recorder: RefCell<Option<Recorder>>,
    is_recorded: Cell<bool>,
}

/// Packet in flight between two addresses.
#[derive(Clone, Copy)]
struct Packet {
    number: u64,
    from: Address,
    to: Address,
    verb: Option<&'static str>,
}

impl Network {
    /// Creates a network without hosts.
    pub fn new(world: &World, wire: Wire, struck: &Rc<Struck>) -> Network {
        Network(Rc::new(Inner {
            world: world.clone(),
            wire: Cell::new(wire),
            rates: Cell::new(FaultRates::NONE),
            local: RefCell::default(),
            pending: RefCell::default(),
            struck: Rc::clone(struck),
            hosts: Cell::new(0),
            inboxes: RefCell::default(),
            next_port: Cell::new(1 << 16),
            cuts: RefCell::default(),
            last: RefCell::default(),
            connections: RefCell::default(),
            packets: Cell::new(0),
            recorder: RefCell::new(None),
            is_recorded: Cell::new(false),
        }))
    }

    /// Calls `recorder` with every later event of a packet. This does not change the run.
    pub fn record(&self, recorder: impl FnMut(&Event<'_>) + 'static) {
        *self.0.recorder.borrow_mut() = Some(Box::new(recorder));
        self.0.is_recorded.set(true);
    }

    fn packet(&self, from: Address, to: Address) -> Packet {
        let number = self.0.packets.get();
        self.0.packets.set(number + 1);
        Packet { number, from, to, verb: None }
    }

    /// Number of times that each fault has struck.
    pub fn struck(&self) -> &Rc<Struck> {
        &self.0.struck
    }

    /// Sets the fault rates of all messages. Removes the rates that were set for single hosts.
    pub fn set_fault_rates(&self, rates: FaultRates) {
        self.0.local.borrow_mut().clear();
        self.0.pending.borrow_mut().clear();
        self.0.rates.set(rates);
    }

    /// Sets the fault rates of messages to and from a host.
    pub fn set_fault_rates_of(&self, host: HostId, rates: FaultRates) {
        self.0.local.borrow_mut().insert(host, rates);
    }

    /// Makes `fault`, which must be a fault that strikes messages, strike the next message to or from the host.
    pub fn strike_next_message(&self, host: HostId, fault: Fault) {
        self.0.pending.borrow_mut().insert(host, fault);
    }

    /// Returns the fault rates of the next message from `from` to `to`.
    fn rates(&self, from: Address, to: Address) -> FaultRates {
        let (local, mut pending) = (self.0.local.borrow(), self.0.pending.borrow_mut());
        let at = |host: HostId| local.get(&host).copied();
        let rates = at(from.host).or_else(|| at(to.host)).unwrap_or(self.0.rates.get());
        let next = pending.remove(&from.host).or_else(|| pending.remove(&to.host));
        next.map_or(rates, |fault| rates.with(fault))
    }

    /// Adds a host to the network.
    pub fn add_host(&self) -> HostId {
        let host = self.0.hosts.get();
        self.0.hosts.set(host + 1);
        HostId(host)
    }

    /// Binds an address: creates its inbox. The address receives messages until the inbox is dropped.
    ///
    /// # Panics
    /// If the address is already bound.
    pub fn bind(&self, address: Address) -> Rc<Inbox> {
        let inbox = Rc::new(Inbox { address, arrived: RefCell::default(), bell: Bell::default() });
        let before = self.0.inboxes.borrow_mut().insert(address, Rc::downgrade(&inbox));
        assert!(before.is_none_or(|before| before.strong_count() == 0), "{address:?} is already bound");
        inbox
    }

    /// Binds an address of the host that was never bound before; see [`Network::bind`].
    pub fn bind_any(&self, host: HostId) -> Rc<Inbox> {
        let port = self.0.next_port.get();
        self.0.next_port.set(port + 1);
        self.bind(Address { host, port })
    }

    /// Blocks all messages from `from` to `to` until the virtual time `until`.
    pub fn cut(&self, from: HostId, to: HostId, until: Nanos, fault: Fault) {
        self.0.cuts.borrow_mut().insert((from, to), (until, fault));
    }

    /// Sends a datagram from one address to another.
    pub fn send(&self, from: Address, to: Address, bytes: Vec<u8>) {
        let (rates, packet) = (self.rates(from, to), self.packet(from, to));
        self.0.tell(packet, What::Send, &bytes);
        if let Some((_, fault)) = self.is_cut(from.host, to.host) {
            return self.0.strike(packet, fault, What::Drop(fault), &bytes);
        }
        let Inner { world, .. } = &*self.0;
        let random = world.random();
        if random.one_in(rates.loss_one_in) {
            return self.0.strike(packet, Fault::Loss, What::Drop(Fault::Loss), &bytes);
        }
        if random.one_in(rates.duplicate_one_in) {
            self.0.strike(packet, Fault::Duplicate, What::Duplicate, &bytes);
            let late = self.flight() + random.heavy(rates.late_ns);
            self.deliver(world.now() + late, packet, Arrival::Message(from, bytes.clone()), None);
        }
        let mut at = world.now() + self.flight();
        if random.one_in(rates.reorder_one_in) {
            let late = random.heavy(rates.late_ns);
            self.0.strike(packet, Fault::Reorder, What::Delay(Fault::Reorder, late), &bytes);
            at += late;
        } else {
            at = self.in_order(packet, at, rates, &bytes);
        }
        self.deliver(at, packet, Arrival::Message(from, bytes), None);
    }

    /// Opens a connection from one address to another.
    pub fn connect(&self, from: Address, to: Address) {
        self.0.connections.borrow_mut().insert((from, to), ());
    }

    /// Sends a message over the connection between the addresses, in either direction. Returns false if there is no
    /// connection.
    pub fn send_on(&self, from: Address, to: Address, bytes: Vec<u8>) -> bool {
        if self.connection(from, to).is_none() {
            return false;
        }
        let packet = self.packet(from, to);
        let Some((at, connection)) = self.leaves_on(packet, &bytes) else { return false };
        self.deliver(at, packet, Arrival::Message(from, bytes), Some(connection));
        true
    }

    /// Sends a message over the connection as [`Network::send_on`] does, and calls `arrived` when the message arrives.
    /// No inbox receives the message: a NIC handles it, not a process. The message carries `verb` with `len` bytes.
    pub fn carry_on(
        &self,
        from: Address,
        to: Address,
        (verb, len): (&'static str, usize),
        arrived: impl FnOnce() + 'static,
    ) -> bool {
        let bytes = vec![0; len];
        let packet = Packet { verb: Some(verb), ..self.packet(from, to) };
        let Some((at, connection)) = self.leaves_on(packet, &bytes) else { return false };
        let network = Rc::downgrade(&self.0);
        self.0.world.at(at, move || {
            let Some(network) = network.upgrade() else { return };
            let is_open = network.connections.borrow().contains_key(&connection);
            network.tell(packet, if is_open { What::Deliver } else { What::Miss }, &bytes);
            if is_open {
                arrived();
            }
        });
        true
    }

    /// Sends a packet over the connection between its addresses. Returns the time of its arrival, and the connection.
    /// Returns `None` if there is no connection, or if the connection breaks now.
    fn leaves_on(&self, packet: Packet, bytes: &[u8]) -> Option<(Nanos, (Address, Address))> {
        let Packet { from, to, .. } = packet;
        let connection = self.connection(from, to)?;
        let rates = self.rates(from, to);
        self.0.tell(packet, What::Send, bytes);
        let Inner { world, struck, .. } = &*self.0;
        if world.random().one_in(rates.reset_one_in) {
            struck.count(Fault::Reset, session(from, to));
            self.end(from, to, Some(Fault::Reset));
            return None;
        }
        let mut at = world.now() + self.flight();
        if let Some((until, fault)) = self.is_cut(from.host, to.host) {
            let late = until - world.now();
            self.0.strike(packet, fault, What::Delay(fault, late), bytes);
            at += late;
        }
        let at = self.in_order(packet, at, rates, bytes);
        Some((at, connection))
    }

    /// Ends the connection between the addresses, if any. Its messages in flight are lost; both ends are notified.
    pub fn hang_up(&self, from: Address, to: Address) {
        self.end(from, to, None);
    }

    fn end(&self, from: Address, to: Address, fault: Option<Fault>) {
        let Some(connection) = self.connection(from, to) else { return };
        self.0.connections.borrow_mut().remove(&connection);
        for (one, other) in [(from, to), (to, from)] {
            let cut = self.is_cut(other.host, one.host).map_or(0, |(until, _)| until - self.0.world.now());
            let at = self.0.world.now() + self.flight() + cut;
            let packet = self.packet(other, one);
            self.0.tell(packet, What::HangUp(fault), &[]);
            self.deliver(at, packet, Arrival::HungUp(other), None);
        }
    }

    /// Ends all connections of the address `of`.
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

    /// Returns the arrival time of a message that is delivered in order. A delay fault may strike; it also delays all
    /// later messages.
    fn in_order(&self, packet: Packet, mut at: Nanos, rates: FaultRates, bytes: &[u8]) -> Nanos {
        let random = self.0.world.random();
        if random.one_in(rates.delay_one_in) {
            let late = random.heavy(rates.late_ns);
            self.0.strike(packet, Fault::Delay, What::Delay(Fault::Delay, late), bytes);
            at += late;
        }
        let mut last = self.0.last.borrow_mut();
        let last = last.entry((packet.from, packet.to)).or_default();
        *last = at.max(*last);
        *last
    }

    fn is_cut(&self, from: HostId, to: HostId) -> Option<(Nanos, Fault)> {
        let cut = self.0.cuts.borrow().get(&(from, to)).copied();
        cut.filter(|(until, _)| *until > self.0.world.now())
    }

    /// Schedules the arrival of a packet at the virtual time `at`. The packet is dropped if, at that time, the address
    /// has no owner, or the connection `over` is not open. If the address has a new owner by that time, this owner
    /// receives the packet.
    fn deliver(&self, at: Nanos, packet: Packet, arrival: Arrival, over: Option<(Address, Address)>) {
        let network = Rc::downgrade(&self.0);
        self.0.world.at(at, move || {
            let Some(network) = network.upgrade() else { return };
            let bytes = if let Arrival::Message(_, bytes) = &arrival { &bytes[..] } else { &[] };
            let inbox = network.inboxes.borrow().get(&packet.to).and_then(Weak::upgrade);
            let is_open = over.is_none_or(|over| network.connections.borrow().contains_key(&over));
            let Some(inbox) = inbox.filter(|_| is_open) else {
                return network.tell(packet, What::Miss, bytes);
            };
            network.tell(packet, What::Deliver, bytes);
            inbox.arrived.borrow_mut().push_back(arrival);
            inbox.bell.ring();
        });
    }
}

impl Inner {
    fn tell(&self, packet: Packet, what: What, bytes: &[u8]) {
        if self.is_recorded.get()
            && let Some(recorder) = &mut *self.recorder.borrow_mut()
        {
            let Packet { number, from, to, verb } = packet;
            recorder(&Event { at: self.world.now(), packet: number, from, to, what, bytes, verb });
        }
    }

    /// Counts a fault that strikes a packet, and records the packet's event `what`.
    fn strike(&self, packet: Packet, fault: Fault, what: What, bytes: &[u8]) {
        self.struck.count(fault, session(packet.from, packet.to));
        self.tell(packet, what, bytes);
    }
}

/// Returns the target of a fault that strikes a message between the addresses.
fn session(from: Address, to: Address) -> Target {
    Target::Session(from.host, to.host)
}

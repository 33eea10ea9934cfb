//! Clients at work: each is a process that opens a session and the store, carries out operations, and writes down what
//! it asked and was answered. One that dies is followed by another.

use super::registers::{BLOCKS, ENTRIES, Registers};
use super::{AGAIN, Carrier, Fabric, PACE, Scene, System, mishaps, values};
use farside_remote::control::{self, Answer};
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::direct::Direct;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::Fault;
use farside_sim::history::{Ask, OperationId, Outcome, Value, Version};
use farside_sim::node::Node;
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS};
use farside_systems::kv::pilaf::Pilaf;
use farside_systems::kv::prism_kv::PrismKv;
use farside_systems::kv::prism_kv::layout::TableSpec;
use farside_systems::kv::{Kv, KvError, Version as Installed};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// How long a node and its clients may be silent to each other: shorter than in earnest, so that a trial is short.
const SILENCE: Nanos = 60 * MILLIS;
/// Keys of different stores are different keys of the history.
const KEYS_PER_STORE: u64 = 1 << 16;

/// What is known of a client through all its processes.
#[derive(Default)]
struct Career {
    /// How many sessions it has opened.
    incarnation: Cell<u64>,
    /// What it has asked and was not answered.
    unanswered: RefCell<Vec<OperationId>>,
}

impl Career {
    /// Nothing that acted for the client is left: what was not answered is done, or never will be.
    fn settle(&self, scene: &Scene) {
        for id in self.unanswered.take() {
            scene.history.borrow_mut().returned(id, Outcome::Unknown, scene.world.now());
        }
    }
}

/// Has a client begin, in a process of its own.
pub(super) fn employ(scene: &Rc<Scene>, client: u32) {
    start(scene, client, &Rc::default());
}

/// Starts the client's next process, and the one after it when that has died.
fn start(scene: &Rc<Scene>, client: u32, career: &Rc<Career>) {
    if scene.is_over() {
        return;
    }
    let world = &scene.world;
    let process = world.start_process();
    scene.clients.borrow_mut()[client as usize] = Some(process);
    let (theirs, next) = (Rc::clone(scene), Rc::clone(career));
    world.on_death(process, move || {
        if theirs.drawn.carrier == Carrier::Direct && theirs.drawn.system.is_one_sided() {
            next.settle(&theirs); // Its CPU ran its chains, and calls nobody.
        }
        theirs.clients.borrow_mut()[client as usize] = None;
        // Some are back while what they have sent is still on its way.
        let usual = if theirs.world.random().one_in(2) { 20 * MICROS } else { MILLIS };
        let after = theirs.world.now() + theirs.world.random().heavy(usual);
        let (scene, next) = (Rc::clone(&theirs), Rc::clone(&next));
        theirs.world.at(after, move || start(&scene, client, &next));
    });
    let skew = if scene.drawn.faults.contains(&Fault::ClockSkew) {
        world.random().below(400_000) as i64 - 200_000
    } else {
        0
    };
    let clock = ProcessClock::new(world, skew, &scene.struck);
    let employed =
        Rc::new(Client { scene: Rc::clone(scene), client, clock, career: Rc::clone(career), process });
    if scene.drawn.faults.contains(&Fault::ClockJump) {
        let jumping = Rc::clone(&employed);
        world.spawn(process, async move {
            loop {
                let scene = &jumping.scene;
                scene.world.sleep(scene.world.random().heavy(4 * MILLIS)).await;
                jumping.clock.jump(scene.world.random().heavy(MILLIS));
            }
        });
    }
    world.spawn(process, async move { employed.live().await });
}

/// Whether all has been asked, and nobody waits for anything any more.
pub(super) fn is_done(scene: &Scene) -> bool {
    scene.violation.borrow().is_some()
        || scene.is_over() && scene.node.is_served() && scene.clients.borrow().iter().all(Option::is_none)
}

/// A client's process.
struct Client {
    scene: Rc<Scene>,
    client: u32,
    clock: ProcessClock,
    career: Rc<Career>,
    process: ProcessId,
}

impl Client {
    /// Works until all is asked, then ends.
    async fn live(self: &Rc<Self>) {
        let scene = &self.scene;
        while !scene.is_over() {
            match self.connect().await {
                Ok(fabric) => self.work(fabric).await,
                Err(_) => scene.world.sleep(scene.world.random().heavy(AGAIN)).await,
            }
        }
        scene.clients.borrow_mut()[self.client as usize] = None;
    }

    async fn connect(&self) -> Result<Fabric, FabricError> {
        let scene = &self.scene;
        let incarnation = self.career.incarnation.get() + 1;
        self.career.incarnation.set(incarnation);
        scene.count(|counts| counts.sessions += 1);
        if scene.drawn.carrier == Carrier::Direct {
            let direct = Direct::open(&scene.node, self.process, &self.clock, PACE).await?;
            return Ok(Fabric::Direct(direct));
        }
        let identity = Identity { identity: u128::from(self.client) + 1, incarnation, silence: SILENCE };
        let engine = self.client % scene.node.options().engines;
        let host = scene.hosts[self.client as usize];
        let endpoint = Endpoint::open(&scene.node, engine, self.process, host, &self.clock, identity).await?;
        if scene.drawn.system.is_one_sided() {
            self.career.settle(scene); // The session before is over, and so are its chains.
        }
        Ok(Fabric::Session(endpoint))
    }

    /// Carries out operations over one session, several at once, until that is over.
    async fn work(self: &Rc<Self>, fabric: Fabric) {
        let scene = &self.scene;
        let tasks = Rc::new(Cell::new(scene.drawn.tasks));
        for _ in 1..scene.drawn.tasks {
            let (mine, fabric, tasks) = (Rc::clone(self), fabric.clone(), Rc::clone(&tasks));
            scene.world.spawn(self.process, async move {
                mine.ask_all(&fabric).await;
                tasks.set(tasks.get() - 1);
            });
        }
        self.ask_all(&fabric).await;
        tasks.set(tasks.get() - 1);
        while tasks.get() > 0 {
            scene.world.sleep(20 * MICROS).await;
        }
        fabric.close().await;
    }

    async fn ask_all(&self, fabric: &Fabric) {
        let scene = &self.scene;
        let node = scene.node.id();
        let name = scene.store_name();
        let store = u64::from(scene.store.get());
        let Ok(kv) = AnyKv::open(scene, fabric, node, &name).await else {
            // It may be on its way.
            return scene.world.sleep(scene.world.random().heavy(AGAIN)).await;
        };
        if name == scene.store_name() {
            scene.is_opened.set(true);
        }
        let career = Rc::clone(&self.career);
        let mut asker = Asker { scene, client: self.client, career, store, kv, seen: None };
        while scene.left.get() > 0 {
            scene.left.set(scene.left.get() - 1);
            if asker.ask_something().await.is_err() {
                return;
            }
            if scene.world.random().one_in(3) {
                scene.world.sleep(scene.world.random().heavy(5 * MICROS)).await;
            }
        }
    }
}

/// A client of whichever system is tried.
enum AnyKv {
    PrismKv(PrismKv<Fabric>),
    Pilaf(Pilaf<Fabric>),
    Registers(Registers<Fabric>),
}

impl AnyKv {
    async fn open(scene: &Scene, fabric: &Fabric, node: NodeId, name: &str) -> Result<AnyKv, KvError> {
        Ok(match scene.drawn.system {
            System::PrismKv => {
                let kv = PrismKv::open(fabric.clone(), node, name).await?;
                AnyKv::PrismKv(kv.with_slot_cache(scene.drawn.slot_cache))
            }
            System::Pilaf => AnyKv::Pilaf(Pilaf::open(fabric.clone(), node, name).await?),
            System::Registers => AnyKv::Registers(Registers::open(fabric.clone(), node, name).await?),
        })
    }

    /// The value of a key, if it is one that was ever put, and its version, where it has one.
    async fn get(&mut self, number: u64) -> Result<Option<(Option<Value>, Option<Installed>)>, KvError> {
        let key = values::key(number);
        let found = match self {
            AnyKv::PrismKv(kv) => kv.get(&key).await?,
            AnyKv::Pilaf(kv) => kv.get(&key).await?,
            AnyKv::Registers(registers) => match number.checked_sub(BLOCKS) {
                None => return Ok(registers.get(number).await?.map(|value| (values::known(value), None))),
                Some(entry) => {
                    return Ok(registers.word(entry).await?.map(|word| (Some(values::of_word(word)), None)));
                }
            },
        };
        Ok(found.map(|item| (values::known(item.value), Some(item.version))))
    }

    async fn put(&mut self, number: u64, value: Value) -> Result<(), KvError> {
        let (key, bytes) = (values::key(number), values::bytes(value));
        match self {
            AnyKv::PrismKv(kv) => kv.put(&key, &bytes).await,
            AnyKv::Pilaf(kv) => kv.put(&key, &bytes).await,
            AnyKv::Registers(registers) => registers.put(number, &bytes, value.tag).await,
        }
    }
}

/// The session is worth nothing any more.
struct Over;

/// Who asks one thing after the other.
struct Asker<'a> {
    scene: &'a Rc<Scene>,
    client: u32,
    career: Rc<Career>,
    store: u64,
    kv: AnyKv,
    /// A version that it has seen, and of which key.
    seen: Option<(u64, Installed)>,
}

impl Asker<'_> {
    async fn ask_something(&mut self) -> Result<(), Over> {
        mishaps::perhaps(self.scene);
        let (number, ask) = match &self.kv {
            AnyKv::Registers(_) => self.of_registers(),
            _ => self.of_keys(),
        };
        let id = self.call(number, ask);
        let done = match ask {
            Ask::Get => self.get(number).await,
            Ask::Put(value) => self.kv.put(number, value).await.map(|()| Outcome::Done(None)),
            Ask::Delete => self.delete(number).await,
            Ask::PutIfAbsent(value) => self.put_if_absent(number, value).await,
            Ask::CompareAndPut { expected, value } => self.compare_and_put(number, expected, value).await,
        };
        match done {
            Ok(outcome) => self.returned(id, outcome),
            Err(error) => return self.failed(id, &error, matches!(ask, Ask::Get)),
        }
        if let AnyKv::Registers(registers) = &mut self.kv
            && self.scene.world.random().one_in(16)
            && let Err(error) = registers.trespass().await
        {
            self.blame(&error);
            return Err(Over);
        }
        Ok(())
    }

    /// What a store of keys is asked.
    fn of_keys(&mut self) -> (u64, Ask) {
        let random = self.scene.world.random();
        let number = random.below(self.scene.drawn.keys);
        let ask = match random.below(16) {
            0..6 => Ask::Get,
            6..10 => Ask::Put(self.new_value()),
            10..13 => Ask::Delete,
            13 if self.is_conditional() => Ask::PutIfAbsent(self.new_value()),
            13 => Ask::Put(self.new_value()),
            _ => match self.seen.take().filter(|(seen, _)| *seen == number) {
                Some((_, version)) => {
                    Ask::CompareAndPut { expected: Version(version.0.into()), value: self.new_value() }
                }
                None => Ask::Get,
            },
        };
        (number, ask)
    }

    /// What a store of registers is asked.
    fn of_registers(&self) -> (u64, Ask) {
        let random = self.scene.world.random();
        let (block, entry) = (random.below(self.scene.drawn.keys), BLOCKS + random.below(ENTRIES));
        match random.below(16) {
            0..6 => (block, Ask::Get),
            6..12 => (block, Ask::Put(self.new_value())),
            12..14 => (entry, Ask::Get),
            _ => (entry, Ask::PutIfAbsent(self.new_value())),
        }
    }

    async fn get(&mut self, number: u64) -> Result<Outcome, KvError> {
        Ok(match self.kv.get(number).await? {
            None => Outcome::Absent,
            Some((Some(value), version)) => {
                self.seen = version.filter(|_| self.is_conditional()).map(|version| (number, version));
                Outcome::Found(value, version.map(told))
            }
            Some((None, _)) => {
                self.scene.blame(format!("a get of key {number} has read bytes that nobody has put"));
                Outcome::Failed
            }
        })
    }

    async fn delete(&mut self, number: u64) -> Result<Outcome, KvError> {
        let key = values::key(number);
        let had_one = match &mut self.kv {
            AnyKv::PrismKv(kv) => kv.delete(&key).await?,
            AnyKv::Pilaf(kv) => kv.delete(&key).await?,
            AnyKv::Registers(_) => unreachable!("registers have no delete"),
        };
        Ok(if had_one { Outcome::Done(None) } else { Outcome::Absent })
    }

    async fn put_if_absent(&mut self, number: u64, value: Value) -> Result<Outcome, KvError> {
        Ok(match &mut self.kv {
            AnyKv::PrismKv(kv) => {
                match kv.put_if_absent(&values::key(number), &values::bytes(value)).await? {
                    true => Outcome::Done(None),
                    false => Outcome::Conflict(None),
                }
            }
            AnyKv::Registers(registers) => {
                let (entry, who) = (number - BLOCKS, u64::from(self.client) + 1);
                match registers.claim(entry, who, values::word(value)).await? {
                    true => Outcome::Done(None),
                    // Whoever has claimed it may not have written it yet, so this tells nothing.
                    false => Outcome::Failed,
                }
            }
            AnyKv::Pilaf(_) => unreachable!("Pilaf has no conditional put"),
        })
    }

    async fn compare_and_put(
        &mut self,
        number: u64,
        expected: Version,
        value: Value,
    ) -> Result<Outcome, KvError> {
        let AnyKv::PrismKv(kv) = &mut self.kv else { unreachable!("only PRISM-KV was asked for that") };
        let expected = Installed(expected.0 as u32);
        Ok(match kv.compare_and_put(&values::key(number), expected, &values::bytes(value)).await? {
            Ok(version) => Outcome::Done(Some(told(version))),
            Err(conflict) => {
                self.scene.count(|counts| counts.conflicts += 1);
                conflict.version.map_or(Outcome::Absent, |version| Outcome::Conflict(Some(told(version))))
            }
        })
    }

    fn new_value(&self) -> Value {
        let (scene, random) = (self.scene, self.scene.world.random());
        let tag = scene.next_tag.get();
        scene.next_tag.set(tag + 1);
        let len = if random.one_in(scene.drawn.large_one_in) {
            random.between(61_000, 140_000)
        } else {
            random.between(8, scene.drawn.value_max)
        };
        Value { tag, len: len as u32 }
    }

    /// Whether the system has conditional puts.
    fn is_conditional(&self) -> bool {
        matches!(self.kv, AnyKv::PrismKv(_))
    }

    fn call(&self, number: u64, ask: Ask) -> OperationId {
        let key = self.store * KEYS_PER_STORE + number;
        let id = self.scene.history.borrow_mut().call(self.client, key, ask, self.scene.world.now());
        self.career.unanswered.borrow_mut().push(id);
        id
    }

    fn returned(&self, id: OperationId, outcome: Outcome) {
        self.career.unanswered.borrow_mut().retain(|unanswered| *unanswered != id);
        self.scene.history.borrow_mut().returned(id, outcome, self.scene.world.now());
    }

    /// What an error says of an operation, and whether the session is any good after it.
    fn failed(&self, id: OperationId, error: &KvError, is_read: bool) -> Result<(), Over> {
        let is_unknown = !is_read && error.ran() != Ran::No;
        self.scene.count(|counts| match error {
            KvError::OutOfMemory => counts.out_of_memory += 1,
            _ if is_unknown => counts.unknown += 1,
            _ => counts.failed += 1,
        });
        if matches!(error, KvError::OutOfMemory) {
            if self.scene.drawn.faults.contains(&Fault::Exhaustion) {
                self.scene.struck.count(Fault::Exhaustion);
            } else if !self.scene.has_node_stood_still() {
                self.scene.blame("there was no memory, although its node had more than enough".to_owned());
            }
        }
        self.blame(error);
        if !is_unknown {
            self.returned(id, Outcome::Failed);
        }
        match error {
            KvError::OutOfMemory | KvError::TableFull(_) | KvError::NotMoved => Ok(()),
            KvError::Fabric(FabricError::Deadline { .. }) => Ok(()),
            _ => Err(Over),
        }
    }

    /// An error may be a finding.
    fn blame(&self, error: &KvError) {
        match error {
            KvError::Damaged(what) => {
                self.scene.blame(format!("a client has found the store damaged: {what}"));
            }
            // Of a store that was dropped a client may be refused anything.
            KvError::Refused(status) if self.store == u64::from(self.scene.store.get()) => {
                self.scene.blame(format!("a client was refused what is its right: {status}"));
            }
            _ => {}
        }
    }
}

/// As histories have versions.
fn told(version: Installed) -> Version {
    Version(version.0.into())
}

/// When all have gone, another client reads every key: what was lost, and nobody has looked at since, shows.
pub(super) fn look_at_all(scene: &Rc<Scene>) {
    if scene.violation.borrow().is_some() || !scene.node.is_served() {
        return;
    }
    scene.network.set_weather(farside_sim::fault::Weather::FAIR);
    let process = scene.world.start_process();
    let client = Client {
        scene: Rc::clone(scene),
        client: scene.drawn.clients,
        clock: ProcessClock::new(&scene.world, 0, &scene.struck),
        career: Rc::default(),
        process,
    };
    let host = scene.hosts[0];
    let looked = async move {
        let scene = &client.scene;
        let node: NodeId = scene.node.id();
        let fabric = if scene.drawn.carrier == Carrier::Direct {
            Fabric::Direct(Direct::open(&scene.node, client.process, &client.clock, PACE).await?)
        } else {
            let identity = Identity { identity: u128::MAX, incarnation: 1, silence: SILENCE };
            let clock = &client.clock;
            Fabric::Session(Endpoint::open(&scene.node, 0, client.process, host, clock, identity).await?)
        };
        let kv = match AnyKv::open(scene, &fabric, node, &scene.store_name()).await {
            Ok(kv) => kv,
            // The node may have died before it had made it.
            Err(_) if !scene.is_opened.get() => return Ok(()),
            Err(error) => {
                scene.blame(format!("a store that was there cannot be opened when all is quiet: {error}"));
                return Ok(());
            }
        };
        let (career, store) = (Rc::clone(&client.career), u64::from(scene.store.get()));
        let mut asker = Asker { scene, client: client.client, career, store, kv, seen: None };
        let entries = if scene.drawn.system == System::Registers { BLOCKS..BLOCKS + ENTRIES } else { 0..0 };
        for number in (0..scene.drawn.keys).chain(entries) {
            let id = asker.call(number, Ask::Get);
            let outcome = asker.get(number).await.unwrap_or_else(|error| {
                scene.blame(format!("key {number} cannot be read when all is quiet: {error}"));
                Outcome::Failed
            });
            asker.returned(id, outcome);
        }
        fabric.close().await;
        Ok::<(), FabricError>(())
    };
    let (done, told) = (Rc::new(Cell::new(None)), scene.world.clone());
    let theirs = Rc::clone(&done);
    told.spawn(process, async move { theirs.set(Some(looked.await)) });
    let until = scene.world.now() + 10 * SECONDS;
    scene.world.run_while(until, || {
        let is_done = done.take();
        let goes_on = is_done.is_none();
        done.set(is_done);
        goes_on
    });
    match done.take() {
        Some(Ok(())) => {}
        Some(Err(error)) => scene.blame(format!("nobody can connect when all is quiet: {error}")),
        None => scene.blame("reading all keys when all is quiet takes for ever".to_owned()),
    }
}

/// When all is quiet, every buffer is reachable, or free, or on its way there: nothing was lost, and nothing is held
/// twice.
pub(super) fn audit(scene: &Rc<Scene>) {
    if scene.violation.borrow().is_some() || !scene.node.is_served() {
        return;
    }
    // Nobody has left anything behind, so there is nothing that only a scan would find.
    let left_nothing = [Fault::ClientDeath, Fault::NodeRestart, Fault::NodeLoss, Fault::Revocation];
    let is_calm = left_nothing.into_iter().all(|fault| scene.struck.of(fault) == 0)
        && (scene.counts.get().unknown, scene.counts.get().failed) == (0, 0);
    let theirs = Rc::clone(scene);
    let audited = scene.world.complete(20 * SECONDS, async move {
        let Scene { world, node, .. } = &*theirs;
        let name = theirs.store_name();
        // Sessions whose clients are dead end by their silence; what they held is looked for then.
        world.sleep(4 * SILENCE).await;
        if is_calm {
            compare(node, &name).await?;
        }
        node.answer(control::Ask::Scan { name: name.clone() }).await?;
        world.sleep(20 * MILLIS).await;
        if theirs.drawn.system == System::PrismKv {
            let left = tables_left(node, &name).await?;
            theirs.count(|counts| counts.rebuilds = left);
        }
        compare(node, &name).await
    });
    match audited {
        Some(Ok(())) => {}
        // The node may have died before it had made it.
        Some(Err(reason)) if reason.contains("no store") && !scene.is_opened.get() => {}
        Some(Err(reason)) => scene.blame(reason),
        None => scene.blame("a scan takes for ever when all is quiet".to_owned()),
    }
}

/// How many tables a store of PRISM-KV has left behind: its first has the epoch 1.
async fn tables_left(node: &Node, name: &str) -> Result<u64, String> {
    let opened = node.answer(control::Ask::OpenStore { name: name.to_owned() }).await?;
    let Answer::Store(store) = opened else { return Err(format!("{opened:?}")) };
    let spec: TableSpec = serde_json::from_str(&store.parameters)
        .map_err(|error| format!("the catalog describes no table: {error}: {}", store.parameters))?;
    Ok(spec.epoch - 1)
}

/// Whether as many buffers of a store are live as its structure reaches.
async fn compare(node: &Node, name: &str) -> Result<(), String> {
    let stat = node.answer(control::Ask::StoreStat { name: name.to_owned() }).await?;
    let Answer::StoreStat(stat) = stat else { return Err(format!("{stat:?}")) };
    let reachable = node.reachable(name)?;
    if stat.live_buffers != reachable {
        return Err(format!("{} buffers are live and {reachable} reachable: {stat:?}", stat.live_buffers));
    }
    if stat.retired_buffers > 0 {
        return Err(format!("{} buffers do not come back when all is quiet: {stat:?}", stat.retired_buffers));
    }
    Ok(())
}

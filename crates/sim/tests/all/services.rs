//! Tests of what services get from a node: locks that let calls run in parallel, a context that is the same in every
//! replay, and steps at the time for which they asked.

use super::verbs::Plain;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Call, Context, Extent, Kind, Locks, Plan, Service, Tick, Work, address};
use farside_remote::{Fabric, Key, Memory, NodeId};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::{Struck, Target};
use farside_sim::network::{Network, Wire};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::world::{MICROS, MILLIS, SECONDS, World};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

pub(super) const NODE: NodeId = NodeId(0);
/// Number of counters of a store, each with a lock of its own.
const KEYS: u64 = 4;
const CLIENTS: u64 = 4;
const CALLS: u64 = 60;
/// Interval at which [`Alarm`] wants to be called.
const INTERVAL: Duration = Duration::from_millis(3);

/// A store whose table has the counters, then a record of each client's last call, then a list of alarms.
struct Counters;

impl<M: Memory> Kind<M> for Counters {
    fn name(&self) -> &'static str {
        "counters"
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        Ok(Plan { table_len: 1 << 16, parameters: parameters.to_owned(), wide: false })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(match parameters {
            "alarm" => Box::new(Alarm { at: table.at }),
            _ => Box::new(Adder { at: table.at, is_parallel: parameters == "parallel" }),
        })
    }
}

/// Adds to a counter in two accesses, between which a call for the same counter would be lost. A request is
/// `| key u8 | client u8 |`, a response `| sum u64 | now u64 | random u64 | calls for other keys that ran u64 |`.
struct Adder {
    at: u64,
    is_parallel: bool,
}

impl Adder {
    fn counter_at(&self, key: u64) -> u64 {
        self.at + key * 64
    }
}

fn load<M: Memory>(memory: &M, at: u64) -> Result<u64, M::Wait> {
    let mut word = [0; 8];
    memory.read(at, &mut word)?;
    Ok(u64::from_le_bytes(word))
}

impl<M: Memory> Service<M> for Adder {
    fn call(
        &self,
        context: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let Context { memory, now, mut random, .. } = context;
        let [key, client] = [0, 1].map(|byte| u64::from(call.request[byte]));
        let at = self.counter_at(key);
        // The second word of a counter says that a call runs.
        if load(memory, at + 8)? != 0 {
            return Ok(Err("two calls of one key run".into()));
        }
        memory.write(at + 8, &1u64.to_le_bytes())?;
        let mut others = 0;
        for other in (0..KEYS).filter(|&other| other != key) {
            others += load(memory, self.counter_at(other) + 8)?;
        }
        let sum = load(memory, at)? + 1;
        let drawn = [now.as_nanos() as u64, random.next()];
        for (index, drawn) in (0..).zip(drawn) {
            memory.write(record_at(self.at, client) + index * 8, &drawn.to_le_bytes())?;
        }
        memory.write(at, &sum.to_le_bytes())?;
        memory.write(at + 8, &0u64.to_le_bytes())?;
        [sum, drawn[0], drawn[1], others]
            .iter()
            .for_each(|word| answer.extend_from_slice(&word.to_le_bytes()));
        Ok(Ok(()))
    }

    fn locks(&self, work: Work<'_>) -> Locks {
        match work {
            Work::Call(request) if self.is_parallel => {
                Locks::of(request.first().copied().unwrap_or(0).into())
            }
            Work::Call(_) | Work::Finish(_) => Locks::ONE,
            Work::Live | Work::Tick => Locks::NONE,
        }
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}

fn record_at(table_at: u64, client: u64) -> u64 {
    table_at + 4096 + client * 64
}

/// Notes the time every [`INTERVAL`]. The table has the number of notes, the time of the next one, and the notes.
struct Alarm {
    at: u64,
}

impl<M: Memory> Service<M> for Alarm {
    fn tick(&self, Context { memory, now, .. }: Context<'_, M>) -> Result<Tick, M::Wait> {
        let (count, due) = (load(memory, self.at)?, load(memory, self.at + 8)?);
        if now < Duration::from_nanos(due) {
            return Ok(Tick::At(Duration::from_nanos(due)));
        }
        let next = now + INTERVAL;
        memory.write(self.at + 16 + count * 8, &(now.as_nanos() as u64 - due).to_le_bytes())?;
        memory.write(self.at + 8, &(next.as_nanos() as u64).to_le_bytes())?;
        memory.write(self.at, &(count + 1).to_le_bytes())?;
        Ok(Tick::At(next))
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}

pub(super) struct Home {
    pub(super) world: World,
    network: Network,
    pub(super) node: Node,
}

impl Home {
    fn new(seed: u64) -> Home {
        let options = Options { is_reliable: true, idle_pause: [MILLIS, 64 * MILLIS], ..Options::default() };
        Home::with(seed, Rc::new(|| vec![Box::new(Counters) as Box<_>, Box::new(Plain)]), options)
    }

    pub(super) fn with(seed: u64, kinds: Kinds, options: Options) -> Home {
        let world = World::new(seed);
        let struck = Rc::new(Struck::default());
        let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: 500 }, &struck);
        let at = network.add_host();
        let node = Node::start(&world, &network, at, NODE, kinds, options);
        Home { world, network, node }
    }

    async fn create(&self, parameters: &str) -> Store {
        let (name, parameters) = ("s".to_owned(), parameters.to_owned());
        let ask = Ask::CreateStore { name, kind: "counters".to_owned(), parameters, quota: 4 << 20 };
        match self.node.answer(ask).await {
            Ok(Answer::Store(store)) => store,
            other => panic!("{other:?}"),
        }
    }

    fn peek(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.node.memory().peek(at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    pub(super) async fn connect(&self, client: u64) -> Rc<Endpoint> {
        let clock = ProcessClock::new(&self.world, 0, self.network.struck(), Target::Client(client as u32));
        let identity = Identity { identity: client.into(), incarnation: 1, silence: 60 * MILLIS };
        let (host, process) = (self.network.add_host(), self.world.start_process());
        let engine = client as u32 % self.node.options().engines;
        Endpoint::open(&self.node, engine, process, host, &clock, identity).await.expect("it responds")
    }
}

pub(super) async fn open_key(endpoint: &Rc<Endpoint>) -> Key {
    let ask = serde_json::to_vec(&Ask::OpenStore { name: "s".to_owned() }).expect("plain data");
    let mut answer = Vec::new();
    endpoint.call(NODE, ServiceId::NODE, &ask, &mut answer).await.expect("it exists");
    match serde_json::from_slice::<Answer>(&answer) {
        Ok(Answer::Store(store)) => store.extent().key,
        other => panic!("{other:?}"),
    }
}

/// Clients call at two engines. Checks every counter and context. Returns the number of calls that ran together with
/// calls for other keys.
fn overlaps(seed: u64, parameters: &'static str) -> u64 {
    let home = Rc::new(Home::new(seed));
    let (overlaps, sums) = (Rc::new(Cell::new(0)), Rc::new(RefCell::new([0; KEYS as usize])));
    let left = Rc::new(Cell::new(CLIENTS));
    let (theirs, counted, made) = (Rc::clone(&home), Rc::clone(&overlaps), Rc::clone(&sums));
    let done = home.world.complete(20 * SECONDS, async move {
        let store = theirs.create(parameters).await;
        for client in 0..CLIENTS {
            let (home, counted, made, left) =
                (Rc::clone(&theirs), Rc::clone(&counted), Rc::clone(&made), Rc::clone(&left));
            let process = theirs.world.start_process();
            theirs.world.spawn(process, async move {
                let endpoint = home.connect(client).await;
                let key = open_key(&endpoint).await;
                let (mut request, mut answer) = (Vec::new(), Vec::new());
                for _ in 0..CALLS {
                    let of = home.world.random().below(KEYS);
                    let service = address(key, &mut request);
                    request.extend_from_slice(&[of as u8, client as u8]);
                    endpoint.call(NODE, service, &request, &mut answer).await.expect("served");
                    let word = |index: usize| {
                        u64::from_le_bytes(answer[index * 8..][..8].try_into().expect("eight bytes"))
                    };
                    made.borrow_mut()[of as usize] += 1;
                    counted.set(counted.get() + word(3));
                    let record = record_at(store.table_at, client);
                    let recorded = (home.peek(record), home.peek(record + 8));
                    assert_eq!((word(1), word(2)), recorded, "each replay has the same context");
                }
                left.set(left.get() - 1);
            });
        }
        while left.get() > 0 {
            theirs.world.sleep(MILLIS).await;
        }
        for key in 0..KEYS {
            let sum = theirs.peek(store.table_at + key * 64);
            assert_eq!(sum, made.borrow()[key as usize], "no call for key {key} is lost");
        }
    });
    home.world.end();
    done.expect("all calls end");
    overlaps.get()
}

#[test]
fn calls_without_a_lock_in_common_run_in_parallel_and_others_one_by_one() {
    let together: u64 = (0..8).map(|seed| overlaps(seed, "parallel")).sum();
    assert!(together > 0, "calls at two engines run in parallel");
    assert_eq!((0..8).map(|seed| overlaps(seed, "one")).sum::<u64>(), 0);
}

#[test]
fn a_service_is_called_at_the_time_for_which_it_asked() {
    let home = Rc::new(Home::new(3));
    let theirs = Rc::clone(&home);
    let done = home.world.complete(20 * SECONDS, async move {
        let store = theirs.create("alarm").await;
        theirs.world.sleep(120 * MILLIS).await;
        let count = theirs.peek(store.table_at);
        let late: Vec<u64> = (1..count).map(|note| theirs.peek(store.table_at + 16 + note * 8)).collect();
        // The idle node checks its stores every 64 ms at most, so it would make two or three steps.
        assert!((30..=40).contains(&count), "{count} steps: {late:?}");
        assert!(late.iter().all(|&late| late < MILLIS), "{late:?}");
        theirs.node.answer(Ask::DropStore { name: "s".to_owned() }).await.expect("dropped");
    });
    home.world.end();
    done.expect("the test ends");
}

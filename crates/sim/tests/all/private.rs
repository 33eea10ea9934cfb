//! Services with private state in simulated nodes: they learn of sessions that end by a kill and by a close, and a node
//! that restarts with its memory rebuilds their state before it serves a call.

#[path = "../../../node/tests/support/keeper.rs"]
mod keeper;

use farside_remote::control::{Answer, Ask, StoreStat};
use farside_remote::fabric::ServiceId;
use farside_remote::service::address;
use farside_remote::{Fabric, NodeId};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::direct::Direct;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::{Struck, Target};
use farside_sim::memory::Pace;
use farside_sim::network::{Network, Wire};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::world::{MICROS, MILLIS, ProcessId, SECONDS, World};
use keeper::{DAMAGED, Keeper};
use std::rc::Rc;

const NODE: NodeId = NodeId(0);

struct Home {
    world: World,
    network: Network,
    node: Node,
}

impl Home {
    fn new(seed: u64) -> Home {
        let world = World::new(seed);
        let struck = Rc::new(Struck::default());
        let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: 500 }, &struck);
        let at = network.add_host();
        let options = Options { is_reliable: seed.is_multiple_of(2), ..Options::default() };
        let kinds: Kinds = Rc::new(|| vec![Box::new(Keeper) as Box<_>]);
        let node = Node::start(&world, &network, at, NODE, kinds, options);
        Home { world, network, node }
    }

    fn clock(&self, client: u32) -> ProcessClock {
        ProcessClock::new(&self.world, 0, self.network.struck(), Target::Client(client))
    }

    /// Opens a session with an engine.
    async fn remote(&self, client: u32) -> (ProcessId, Rc<Endpoint>) {
        let (host, process) = (self.network.add_host(), self.world.start_process());
        let identity = Identity { identity: client.into(), incarnation: 1, silence: 60 * MILLIS };
        let engine = client % self.node.options().engines;
        let opened = Endpoint::open(&self.node, engine, process, host, &self.clock(client), identity).await;
        (process, opened.expect("it responds"))
    }

    /// Opens a session of a process at the node's host.
    async fn local(&self, client: u32) -> (ProcessId, Rc<Direct>) {
        let process = self.world.start_process();
        let opened = Direct::open(&self.node, process, &self.clock(client), Pace::CPU).await;
        (process, opened.expect("it responds"))
    }

    async fn stat(&self) -> StoreStat {
        match self.node.answer(Ask::StoreStat { name: "s".to_owned() }).await {
            Ok(Answer::StoreStat(stat)) => stat,
            other => panic!("{other:?}"),
        }
    }

    async fn wait_for(&self, sessions: u64) {
        while self.stat().await.service["sessions_with_some"] != sessions {
            self.world.sleep(MILLIS).await;
        }
    }
}

/// Makes a call, and returns the numbers of reservations that were ever made, and of those of the session.
async fn call(client: &impl Fabric, ask: keeper::Ask) -> [u64; 2] {
    let (mut request, mut answer) = (Vec::new(), Vec::new());
    let open = serde_json::to_vec(&Ask::OpenStore { name: "s".to_owned() }).expect("plain data");
    client.call(NODE, ServiceId::NODE, &open, &mut answer).await.expect("it exists");
    let Ok(Answer::Store(store)) = serde_json::from_slice(&answer) else { panic!("no store") };
    let service = address(store.extent().key, &mut request);
    request.push(ask as u8);
    // A call of a local process is refused while another one runs.
    while client.call(NODE, service, &request, &mut answer).await.is_err() {}
    [0, 8].map(|at| u64::from_le_bytes(answer[at..at + 8].try_into().expect("eight bytes")))
}

async fn reserve(client: &impl Fabric) {
    assert_eq!(call(client, keeper::Ask::Reserve).await[1], 1, "the session is a new one");
}

fn complete(seed: u64, story: impl AsyncFnOnce(Rc<Home>) + 'static) {
    let home = Rc::new(Home::new(seed));
    let theirs = Rc::clone(&home);
    let done = home.world.complete(20 * SECONDS, async move {
        let (name, kind, parameters) = ("s".to_owned(), "keeper".to_owned(), String::new());
        let created = theirs.node.answer(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }).await;
        assert!(matches!(created, Ok(Answer::Store(_))), "{created:?}");
        story(theirs).await;
    });
    home.world.end();
    done.expect("the story ends");
}

#[test]
fn a_service_learns_of_sessions_that_are_closed_or_whose_processes_are_killed() {
    for seed in 0..12 {
        complete(seed, async |home: Rc<Home>| {
            let (killed, remote) = home.remote(1).await;
            let (_, closed) = home.remote(2).await;
            let (dead, local) = home.local(3).await;
            let (_, left) = home.local(4).await;
            let (_, stays) = home.remote(5).await;
            reserve(&*remote).await;
            reserve(&*closed).await;
            reserve(&*local).await;
            reserve(&*left).await;
            reserve(&*stays).await;
            home.wait_for(5).await;
            home.world.kill(killed);
            home.wait_for(4).await;
            closed.close().await;
            home.wait_for(3).await;
            home.world.kill(dead);
            home.wait_for(2).await;
            left.close().await;
            home.wait_for(1).await;
            assert_eq!(call(&*stays, keeper::Ask::Look).await, [5, 1]);
        });
    }
}

#[test]
fn a_node_with_kept_memory_recovers_private_state_before_it_serves_a_call() {
    for seed in 0..12 {
        complete(seed, async |home: Rc<Home>| {
            let mut made = 0;
            for round in 0..3 {
                let (process, client) = home.local(round).await;
                for _ in 0..round * 17 + 5 {
                    call(&*client, keeper::Ask::Reserve).await;
                    made += 1;
                }
                home.world.kill(process);
                drop(client);
                home.node.kill();
                // The end of the client's session is still being reported to the former process.
                home.world.sleep(100 * MILLIS).await;
                home.node.restart();
                // A restart may be killed, too, and begins again.
                home.world.sleep(home.world.random().below(20 * MICROS)).await;
                home.node.restart();
                while !home.node.is_served() {
                    home.world.sleep(MICROS).await;
                }
                let (_, client) = home.remote(round + 10).await;
                assert_eq!(call(&*client, keeper::Ask::Look).await, [made, 0], "round {round}");
                client.close().await;
            }
        });
    }
}

#[test]
#[should_panic(expected = "its table is damaged")]
fn a_node_does_not_serve_a_store_that_it_cannot_recover() {
    complete(1, async |home: Rc<Home>| {
        let at = home.node.answer(Ask::OpenStore { name: "s".to_owned() }).await;
        let Ok(Answer::Store(store)) = at else { panic!("no store") };
        home.node.memory().poke(store.table_at, &DAMAGED.to_le_bytes());
        home.node.restart();
        home.world.sleep(SECONDS).await;
    });
}

//! Services with private state: it is rebuilt by a node that takes over, knows the sessions of callers, and learns when
//! they have ended. Their stores lie in their tables alone, and report numbers.

use crate::support::keeper::{self, DAMAGED, Keeper};
use farside_fabrics::executor::block_on;
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::shm;
use farside_node::host::{Admin, Host, Listen, Options};
use farside_node::log::{Log, LogOptions, StoreLog};
use farside_node::served::{Begun, Buffers, Calling, Served, Start};
use farside_node::{Node, Progress};
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::control::{Answer, Ask, NodeInfo, Store, StoreStat};
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Kind, Work, address};
use farside_remote::{Fabric, Memory, NodeId, Rights};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(20);
const NODE: NodeId = NodeId(0);
const QUOTA: u64 = 4 << 20;

/// A node that the test steps, with one store.
struct Home {
    memory: Mapping,
    node: Node<Mapping>,
    store: Store,
}

fn kinds() -> Vec<Box<dyn Kind<Mapping>>> {
    vec![Box::new(Keeper)]
}

impl Home {
    fn new() -> Home {
        let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
        let mut node = Node::new(&memory, kinds(), NodeInfo::default());
        let (name, kind, parameters) = ("s".into(), "keeper".into(), String::new());
        node.ask(Ask::CreateStore { name, kind, parameters, quota: QUOTA }, [3, 4]);
        idle(&mut node, &memory);
        let Some((_, Ok(Answer::Store(store)))) = node.answer() else { panic!("no store") };
        Home { memory, node, store }
    }

    /// Makes the node check its stores twice, as the host does at intervals. A session with a slot is closed by the
    /// first check, perhaps after the service's step.
    fn look(&mut self) {
        for _ in 0..2 {
            self.node.poll_shared();
            idle(&mut self.node, &self.memory);
        }
    }

    fn served(&self) -> Arc<Served<Mapping>> {
        self.node.served(self.store.region).expect("it is served")
    }

    fn call(&self, session: u32, ask: keeper::Ask) -> (Option<Begun>, Vec<u8>) {
        let (key, request) = (self.store.extent().key, [ask as u8]);
        let calling = Calling { key, rights: Rights::ALL, session: Some(session), request: &request };
        let mut answer = Vec::new();
        let served =
            self.served().serve(&self.memory, || START, calling, &mut Buffers::default(), &mut answer);
        (served.expect("served"), answer)
    }

    fn reserve(&self, session: u32) {
        self.call(session, keeper::Ask::Reserve);
    }

    /// A number that the service reports.
    fn number(&self, name: &str) -> u64 {
        number(&self.served(), name)
    }
}

const START: Start = Start { now: Duration::ZERO, seed: 0 };

fn number(served: &Served<Mapping>, name: &str) -> u64 {
    served.report().into_iter().find(|(of, _)| *of == name).expect("it reports the number").1
}

fn idle(node: &mut Node<Mapping>, memory: &Mapping) {
    while node.step(memory) == Ok(Progress::Made) {}
}

#[test]
fn a_service_learns_of_ended_sessions_of_every_kind_and_of_no_others() {
    let mut home = Home::new();
    let memory = &home.memory;
    let open = |node: &mut Node<Mapping>, pid| {
        let Ok(opened) = node.open_session(memory, pid, 1);
        opened.expect("a slot is free")
    };
    let (closed, died, stays) = (open(&mut home.node, 7), open(&mut home.node, 8), open(&mut home.node, 9));
    let remote: [u32; 3] = std::array::from_fn(|_| {
        let Ok(number) = home.node.open_remote(&home.memory);
        number
    });
    for session in [closed.number, died.number, stays.number].into_iter().chain(remote) {
        home.reserve(session);
    }
    home.look();
    assert_eq!(home.number("sessions_with_some"), 6);
    home.node.end_session(closed, true);
    home.look();
    assert_eq!(home.number("sessions_with_some"), 5);
    home.node.end_session(died, false);
    home.node.end_remote(remote[0], true);
    home.node.end_remote(remote[1], false);
    home.look();
    assert_eq!(home.number("sessions_with_some"), 2);
    for session in [stays.number, remote[2]] {
        let (_, answer) = home.call(session, keeper::Ask::Look);
        assert_eq!(answer[8..], 1u64.to_le_bytes(), "session {session} has its reservation");
    }
}

#[test]
fn the_end_of_a_session_is_not_lost_while_a_call_holds_the_locks() {
    let mut home = Home::new();
    let Ok(remote) = home.node.open_remote(&home.memory);
    home.reserve(remote);
    let served = home.served();
    let guard = served.lock(Work::Call(&[]));
    home.node.end_remote(remote, true);
    home.look();
    assert_eq!(home.number("sessions_with_some"), 1, "the locks are held");
    drop(guard);
    home.look();
    assert_eq!(home.number("sessions_with_some"), 0);
}

#[test]
fn a_session_is_not_gone_before_the_second_parts_of_its_calls() {
    let mut home = Home::new();
    let log = Log::new(home.store.clone(), LogOptions::default(), 1);
    home.node.resume_log("s", Arc::new(StoreLog::new(log))).expect("the store is there");
    let Ok(remote) = home.node.open_remote(&home.memory);
    home.reserve(remote);
    let (begun, _) = home.call(remote, keeper::Ask::Withdraw);
    let begun = begun.expect("its record is not stored yet");
    home.node.end_remote(remote, true);
    let Ok(other) = home.node.open_remote(&home.memory);
    home.reserve(other);
    home.node.end_remote(other, true);
    for _ in 0..3 {
        home.look();
        assert_eq!(home.number("sessions_with_some"), 1, "only the session without such a call is gone");
    }
    let (mut buffers, mut answer) = (Buffers::default(), Vec::new());
    let finished = home.served().finish(&home.memory, START, (&begun, &Ok(())), &mut buffers, &mut answer);
    assert_eq!(finished, Ok(()), "the reservation was kept for the second part");
    home.reserve(remote);
    home.look();
    assert_eq!(home.number("sessions_with_some"), 0, "the session is gone after the second part");
}

#[test]
fn private_state_is_recovered_from_a_kept_memory_before_anything_is_served() {
    let home = Home::new();
    for session in 1..=37 {
        home.reserve(session);
    }
    let Home { memory, node, store } = home;
    drop(node);
    let Ok(restored) = Node::restore(&memory, kinds(), NodeInfo::default());
    let mut node = restored.expect("the memory is sound");
    let served = node.served(store.region).expect("it is served");
    let mut steps = 1;
    while node.recover_step(&memory) == Ok(Ok(false)) {
        steps += 1;
    }
    assert_eq!((number(&served, "made"), steps), (37, 3));
    idle(&mut node, &memory);
}

#[test]
#[should_panic(expected = "recovers its services before it serves")]
fn a_node_makes_no_step_before_its_services_are_recovered() {
    let Home { memory, .. } = Home::new();
    let Ok(restored) = Node::restore(&memory, kinds(), NodeInfo::default());
    let Ok(_) = restored.expect("the memory is sound").step(&memory);
}

#[test]
fn a_store_whose_state_cannot_be_recovered_is_named() {
    let Home { memory, store, .. } = Home::new();
    let Ok(()) = memory.write(store.table_at, &DAMAGED.to_le_bytes());
    let Ok(restored) = Node::restore(&memory, kinds(), NodeInfo::default());
    let Ok(recovered) = restored.expect("the catalog is sound").recover_step(&memory);
    assert_eq!(recovered, Err("store 's' cannot be served: its table is damaged".into()));
}

#[test]
fn a_store_in_its_table_alone_takes_its_quota_and_no_more() {
    let mut home = Home::new();
    let segments = home.memory.geometry().segments();
    let free = |home: &Home| home.node.info().unassigned_bytes / SEGMENT_SIZE;
    assert_eq!(free(&home), u64::from(segments) - QUOTA / SEGMENT_SIZE);
    assert_eq!(home.store.table_len, QUOTA);
    home.node.ask(Ask::StoreStat { name: "s".into() }, [0, 0]);
    home.look();
    let Some((_, Ok(Answer::StoreStat(stat)))) = home.node.answer() else { panic!("no figures") };
    let service = [("made".to_owned(), 0), ("sessions_with_some".to_owned(), 0)].into();
    let expected = StoreStat {
        quota_bytes: QUOTA,
        table_bytes: QUOTA,
        service,
        scans: stat.scans,
        ..StoreStat::default()
    };
    assert!(stat == expected && stat.is_table_only(), "{stat:?}");
    // As after the loss of its memory, it is created again as it was.
    home.node.ask(Ask::DropStore { name: "s".into() }, [0, 0]);
    home.look();
    while home.node.answer().is_some() {}
    assert_eq!(free(&home), u64::from(segments));
    home.node.recreate(&home.store.clone(), 5).expect("it fits");
    home.look();
    assert_eq!(free(&home), u64::from(segments) - QUOTA / SEGMENT_SIZE);
}

// A running node, and sessions of other processes.

/// Starts a node whose store is open to shm clients, and at a ring.
fn serve(folder: &Path) -> Host {
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let options = Options {
        socket: Some(folder.join("socket")),
        listen: vec![Listen::Ring(folder.join("ring"))],
        admin: Some(Admin { listen: ([127, 0, 0, 1], 0).into(), token: None }),
        ..Options::default()
    };
    let host = Host::start(memory, kinds(), options).expect("it serves");
    let (name, kind, parameters) = ("s".into(), "keeper".into(), String::new());
    let created = host.ask(Ask::CreateStore { name, kind, parameters, quota: QUOTA }, DEADLINE);
    assert!(matches!(created, Ok(Answer::Store(_))), "{created:?}");
    host
}

fn stat(host: &Host) -> StoreStat {
    match host.ask(Ask::StoreStat { name: "s".into() }, DEADLINE) {
        Ok(Answer::StoreStat(stat)) => stat,
        other => panic!("{other:?}"),
    }
}

fn wait_for(host: &Host, sessions: u64) {
    let began = Instant::now();
    while stat(host).service["sessions_with_some"] != sessions {
        assert!(began.elapsed() < DEADLINE, "{:?} and not {sessions}", stat(host));
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

async fn reserve(client: &impl Fabric) {
    let (mut request, mut answer) = (Vec::new(), Vec::new());
    let ask = serde_json::to_vec(&Ask::OpenStore { name: "s".into() }).expect("plain data");
    client.call(NODE, ServiceId::NODE, &ask, &mut answer).await.expect("the store is there");
    let Ok(Answer::Store(store)) = serde_json::from_slice(&answer) else { panic!("no store") };
    let service = address(store.extent().key, &mut request);
    request.push(keeper::Ask::Reserve as u8);
    client.call(NODE, service, &request, &mut answer).await.expect("served");
    assert_eq!(answer[8..], 1u64.to_le_bytes(), "the session is a new one");
}

/// Opens a session at the ring, in which one reservation is made.
fn reserve_at_ring(path: &Path, identity: u128) -> Endpoint<RingLine> {
    let config = Config { identity, incarnation: 1, nonce: 7, ..Config::default() };
    let line = RingLine::connect(path).expect("it listens");
    let client = Endpoint::open(line, NODE, config).unwrap_or_else(|error| panic!("{error}"));
    block_on(&client, reserve(&client));
    client
}

const FOLDER: &str = "FARSIDE_TEST_PRIVATE_NODE";

/// The process of clients. It is no test, but must be one to be run.
#[test]
#[ignore = "a process that another test starts"]
fn client_process() {
    #[allow(clippy::disallowed_methods, reason = "the test that starts this process names the folder by it")]
    let folder = std::env::var_os(FOLDER).map(PathBuf::from);
    let Some(folder) = folder else { return };
    let client = shm::connect(&folder.join("socket"), NODE).expect("it serves");
    block_on(&client, reserve(&client));
    let _at_ring = reserve_at_ring(&folder.join("ring"), 2);
    std::fs::write(folder.join("ready"), "").expect("written");
    std::thread::park();
}

fn start_clients(folder: &Path) -> Child {
    let program = std::env::current_exe().expect("this test");
    let mut command = Command::new(program);
    command.args(["--exact", "private::client_process", "--ignored", "--nocapture"]).env(FOLDER, folder);
    let child = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().expect("it starts");
    let began = Instant::now();
    while !folder.join("ready").exists() {
        assert!(began.elapsed() < DEADLINE, "the clients start");
        std::thread::park_timeout(Duration::from_millis(2));
    }
    child
}

#[test]
fn reservations_end_with_sessions_that_are_closed_or_whose_processes_are_killed() {
    let folder = tempfile::tempdir().expect("a folder");
    let host = serve(folder.path());
    let shm = shm::connect(&folder.path().join("socket"), NODE).expect("it serves");
    block_on(&shm, reserve(&shm));
    let ring = reserve_at_ring(&folder.path().join("ring"), 1);
    let mut clients = start_clients(folder.path());
    assert_eq!(stat(&host).service["sessions_with_some"], 4);
    assert_eq!(stat(&host).service["made"], 4);
    drop(ring);
    wait_for(&host, 3);
    drop(shm);
    wait_for(&host, 2);
    clients.kill().expect("it runs");
    clients.wait().expect("it was killed");
    wait_for(&host, 0);
    assert_eq!(stat(&host).service["made"], 4);
}

#[test]
fn the_numbers_of_a_service_are_metrics_of_the_node() {
    let folder = tempfile::tempdir().expect("a folder");
    let host = serve(folder.path());
    let at = host.admin_at().expect("it serves HTTP");
    let mut stream = std::net::TcpStream::connect(at).expect("it listens");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
        .expect("it accepts a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it responds");
    for line in [
        "# TYPE farside_store_service gauge",
        "farside_store_service{store=\"s\",name=\"made\"} 0",
        "farside_store_service{store=\"s\",name=\"sessions_with_some\"} 0",
    ] {
        assert!(text.contains(line), "{line} is missing: {text}");
    }
}

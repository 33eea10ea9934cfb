//! Logs of a running node: what was acknowledged survives a kill of the process and the loss of its memory. A damaged
//! file and a folder in use are reported.

#[path = "../support/ledger.rs"]
mod ledger;

use farside_fabrics::executor::{Core, block_on};
use farside_fabrics::local::LocalNode;
use farside_fabrics::memory::{Found, Mapping, Pages};
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::carrier::Line;
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::shm;
use farside_fabrics::tcp::TcpLine;
use farside_fabrics::udp::UdpLine;
use farside_node::host::{BindError, Host, Listen, LogFolder, Options};
use farside_node::log::{LogOptions, Next, Op, SyncPolicy, folder_of, format};
use farside_node::{Node, Progress};
use farside_remote::arena::header;
use farside_remote::control::{Answer, Ask, NodeInfo, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Kind, address};
use farside_remote::{Fabric, Key, Memory, NodeId};
use ledger::{KEYS, Ledger, words};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(20);
const NODE: NodeId = NodeId(0);

fn options(folder: &Path, sync: SyncPolicy, checkpoint_min: u64) -> Options {
    let options = LogOptions { sync, checkpoint_min, ..LogOptions::default() };
    Options { log: Some(LogFolder { path: folder.to_owned(), options }), ..Options::default() }
}

/// Starts a node with fresh memory.
fn start(options: Options) -> Result<Host, BindError> {
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    Host::start(memory, vec![Box::new(Ledger::default()) as Box<dyn Kind<Mapping>>], options)
}

fn create(host: &Host) {
    let (name, kind, parameters) = ("s".into(), "ledger".into(), String::new());
    let created = host.ask(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }, DEADLINE);
    assert!(matches!(created, Ok(Answer::Store(_))), "{created:?}");
}

fn key_of(host: &Host) -> Key {
    match host.ask(Ask::OpenStore { name: "s".into() }, DEADLINE) {
        Ok(Answer::Store(store)) => store.extent().key,
        other => panic!("{other:?}"),
    }
}

/// A caller in the process of the node.
struct Caller<'a> {
    host: &'a Host,
    session: farside_remote::arena::session::SessionId,
    key: Key,
}

impl<'a> Caller<'a> {
    fn new(host: &'a Host) -> Caller<'a> {
        Caller { host, session: host.open_session().expect("a slot is free"), key: key_of(host) }
    }

    fn ask(&self, ask: ledger::Ask) -> Result<Vec<u64>, String> {
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        let service = address(self.key, &mut request);
        ask.encode(&mut request);
        let called = self.host.call(self.session, service, &request, &mut answer);
        called.map(|()| words(&answer)).map_err(|error| error.to_string())
    }

    fn put(&self, key: u64, value: u64) -> Result<u64, String> {
        self.ask(ledger::Ask::Put(key, value)).map(|words| words[0])
    }

    fn get(&self, key: u64) -> [u64; 2] {
        let words = self.ask(ledger::Ask::Get(key)).expect("reads need no log");
        [words[0], words[1]]
    }
}

#[test]
fn a_store_and_its_puts_survive_the_loss_of_memory_under_each_policy() {
    for sync in [SyncPolicy::Never, SyncPolicy::Interval, SyncPolicy::Each] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut model = [[0, 0]; KEYS as usize];
        for round in 0..3u64 {
            // A checkpoint replaces the log several times a round.
            let host = start(options(folder.path(), sync, 4096)).expect("it serves");
            if round == 0 {
                create(&host);
            }
            let caller = Caller::new(&host);
            for (key, expected) in (0..).zip(model) {
                assert_eq!(caller.get(key), expected, "{sync:?}, round {round}, key {key}");
            }
            for put in 0..600 {
                let (key, value) = (put * 7 % KEYS, round * 1000 + put);
                let stamp = caller.put(key, value).expect("stored");
                assert!(stamp > model[key as usize][0], "stamps rise across restarts");
                model[key as usize] = [stamp, value];
            }
        }
        let host = start(options(folder.path(), sync, 4096)).expect("it serves");
        let began = Instant::now();
        // 1800 records have more than 90 KiB, the live ones 4 KiB.
        while size_of_log(folder.path()) > 16 << 10 {
            assert!(began.elapsed() < DEADLINE, "checkpoints keep the log short");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        drop(host);
        let host = start(options(folder.path(), sync, 4096)).expect("it serves");
        let caller = Caller::new(&host);
        for (key, expected) in (0..).zip(model) {
            assert_eq!(caller.get(key), expected, "{sync:?}, after a checkpoint, key {key}");
        }
    }
}

fn creates(host: &Host) -> Result<Answer, String> {
    let (name, kind, parameters) = ("s".into(), "ledger".into(), String::new());
    host.ask(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }, DEADLINE)
        .map_err(|error| error.to_string())
}

/// The disk is full at each step of the log's creation.
#[test]
fn a_store_whose_log_cannot_be_created_is_not_created() {
    const FULL: i32 = 28;
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let kinds = || vec![Box::new(Ledger::default()) as Box<dyn Kind<Mapping>>];
    for failing in [Some(0), Some(1), Some(2), None] {
        let mut node = Node::new(&memory, kinds(), NodeInfo::default());
        node.set_logging(LogOptions::default());
        let free = node.info().unassigned_bytes;
        let (name, kind, parameters) = ("s".to_owned(), "ledger".to_owned(), String::new());
        let ask = Ask::CreateStore { name: name.clone(), kind, parameters, quota: 4 << 20 };
        for attempt in 0..2 {
            node.ask(ask.clone(), [3 + attempt, 4]);
            let (mut answer, mut logs, mut ops) = (None, Vec::new(), Vec::new());
            for _ in 0..200 {
                while node.step(&memory) == Ok(Progress::Made) {}
                node.poll_shared();
                answer = answer.or(node.answer().map(|(_, answer)| answer));
                logs.extend(node.take_new_logs());
                for log in &logs {
                    let mut log = log.lock();
                    if let Next::Do(op) = log.next(Duration::ZERO) {
                        let fails = attempt == 0 && failing == Some(ops.len());
                        log.done(if fails { Err(std::io::Error::from_raw_os_error(FULL)) } else { Ok(()) });
                        ops.push(op);
                    }
                }
            }
            let answer = answer.expect("the node answers");
            if attempt == 1 || failing.is_none() {
                assert!(matches!(answer, Ok(Answer::Store(_))), "{failing:?}: {answer:?}");
                break;
            }
            let refusal = answer.expect_err("the disk is full");
            assert!(refusal.contains("store 's' was not created"), "{refusal}");
            assert!(refusal.contains("No space left"), "{refusal}");
            assert!(refusal.contains("free space in --log-dir"), "{refusal}");
            assert!(matches!(ops.last(), Some(Op::RemoveFolder(_))), "{ops:?}");
            assert_eq!(node.info().unassigned_bytes, free, "nothing is left of it");
            assert!(node.catalog().get(&name).is_err());
        }
        assert!(node.catalog().get(&name).is_ok(), "{failing:?}");
        node.ask(Ask::DropStore { name }, [5, 6]);
        while node.step(&memory) == Ok(Progress::Made) {}
    }
}

#[test]
fn a_node_goes_on_after_a_log_could_not_be_created() {
    let folder = tempfile::tempdir().expect("a folder");
    let (logs, away) = (folder.path().join("logs"), folder.path().join("away"));
    let host = start(options(&logs, SyncPolicy::Each, 1 << 20)).expect("it serves");
    std::fs::rename(&logs, &away).expect("renamed");
    std::fs::write(&logs, b"no folder").expect("written");
    let refusal = creates(&host).expect_err("there is no folder");
    assert!(refusal.contains("was not created") && refusal.contains("--log-dir"), "{refusal}");
    std::fs::remove_file(&logs).expect("removed");
    std::fs::rename(&away, &logs).expect("renamed");
    create(&host);
    assert_eq!(Caller::new(&host).put(1, 2), Ok(1));
    drop(host);
    let host = start(options(&logs, SyncPolicy::Each, 1 << 20)).expect("it serves");
    assert_eq!(Caller::new(&host).get(1)[1], 2);
}

/// A copy of a log beside it could be taken for the log, and replace what is newer.
#[test]
fn a_log_in_the_folder_of_another_name_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = || options(folder.path(), SyncPolicy::Each, 1 << 20);
    let host = start(options()).expect("it serves");
    create(&host);
    Caller::new(&host).put(1, 2).expect("stored");
    let own = folder_of(&store_of(&host));
    drop(host);
    let (log, copy) = (folder.path().join(&own), folder.path().join(own.replacen('s', "z", 1)));
    std::fs::create_dir(&copy).expect("a folder");
    for file in std::fs::read_dir(&log).expect("the log") {
        let file = file.expect("a file").path();
        std::fs::copy(&file, copy.join(file.file_name().expect("a name"))).expect("copied");
    }
    let refused = start(options()).err().expect("there are two logs of one store").to_string();
    assert!(refused.contains("perhaps as a copy") && refused.contains(&own), "{refused}");
    std::fs::remove_dir_all(&log).expect("removed");
    let refused = start(options()).err().expect("the log has another name").to_string();
    assert!(refused.contains(&format!("rename it to {own}")), "{refused}");
    std::fs::rename(&copy, &log).expect("renamed");
    let host = start(options()).expect("it serves");
    assert_eq!(Caller::new(&host).get(1)[1], 2);
}

#[test]
fn a_call_to_a_node_that_has_ended_does_not_wait_for_its_log() {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let folder = tempfile::tempdir().expect("a folder");
        let host = start(options(folder.path(), SyncPolicy::Each, 1 << 20)).expect("it serves");
        create(&host);
        let caller = Caller::new(&host);
        let before = caller.put(1, 2);
        host.stop();
        drop(tell.send((before, caller.put(1, 3))));
    });
    let (before, after) = told.recv_timeout(DEADLINE).expect("the call does not wait for ever");
    assert_eq!(before, Ok(1));
    let refused = after.expect_err("nobody writes the log");
    assert!(refused.contains("the node has ended"), "{refused}");
}

#[test]
fn threads_share_syncs_and_lose_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let host = start(options(folder.path(), SyncPolicy::Each, 1 << 20)).expect("it serves");
    create(&host);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let host = &host;
            scope.spawn(move || {
                let caller = Caller::new(host);
                for put in 0..50 {
                    caller.put(thread, put).expect("stored");
                }
            });
        }
    });
    drop(host);
    let host = start(options(folder.path(), SyncPolicy::Each, 1 << 20)).expect("it serves");
    let caller = Caller::new(&host);
    for thread in 0..8 {
        assert_eq!(caller.get(thread)[1], 49);
    }
}

/// Puts over a session with an engine, with several calls in flight. Returns the stamps of the last puts.
fn put_over<L: Line + 'static>(line: L, host: &Host, tasks: u64, puts: u64) -> Vec<u64> {
    let config = Config { identity: 5, incarnation: 1, nonce: 7, ..Config::default() };
    let client = Endpoint::open(line, NODE, config).unwrap_or_else(|error| panic!("{error}"));
    let mut answer = Vec::new();
    let ask = serde_json::to_vec(&Ask::OpenStore { name: "s".into() }).expect("plain data");
    block_on(&client, client.call(NODE, ServiceId::NODE, &ask, &mut answer)).expect("the store is there");
    let Ok(Answer::Store(store)) = serde_json::from_slice(&answer) else { panic!("no store") };
    let key = store.extent().key;
    assert_ne!(key, key_of(host), "a session has a key of its own");
    let stamps = std::cell::RefCell::new(vec![0; tasks as usize]);
    let mut core = Core::new(&client);
    for task in 0..tasks {
        let (client, stamps) = (&client, &stamps);
        core.spawn(async move {
            let (mut request, mut answer) = (Vec::new(), Vec::new());
            for put in 0..puts {
                let service = address(key, &mut request);
                ledger::Ask::Put(task, put).encode(&mut request);
                client.call(NODE, service, &request, &mut answer).await.expect("stored");
                stamps.borrow_mut()[task as usize] = words(&answer)[0];
                let service = address(key, &mut request);
                ledger::Ask::Get(task).encode(&mut request);
                client.call(NODE, service, &request, &mut answer).await.expect("served");
                assert_eq!(words(&answer)[1], put, "a put that was answered is seen");
            }
        });
    }
    core.run();
    drop(core);
    stamps.into_inner()
}

#[test]
fn engines_answer_calls_once_they_are_stored_and_serve_others_meanwhile() {
    const TASKS: u64 = 32;
    let folder = tempfile::tempdir().expect("a folder");
    let listen = vec![
        Listen::Ring(folder.path().join("ring")),
        Listen::Tcp((std::net::Ipv4Addr::LOCALHOST, 0).into()),
        Listen::Udp((std::net::Ipv4Addr::LOCALHOST, 0).into()),
    ];
    let logs = folder.path().join("logs");
    let host = start(Options { listen, ..options(&logs, SyncPolicy::Each, 1 << 20) }).expect("it serves");
    create(&host);
    let mut last = Vec::new();
    for (round, listen) in (1..).zip(host.listening()) {
        #[allow(unreachable_patterns, reason = "TLS is a feature")]
        let stamps = match listen {
            Listen::Ring(path) => put_over(RingLine::connect(path).expect("a line"), &host, TASKS, 5 * round),
            Listen::Tcp(at) => put_over(TcpLine::connect(*at).expect("a line"), &host, TASKS, 5 * round),
            Listen::Udp(at) => {
                put_over(UdpLine::connect(*at, None).expect("a line"), &host, TASKS, 5 * round)
            }
            other => panic!("{other}"),
        };
        last = stamps;
    }
    drop(host);
    let host = start(options(&logs, SyncPolicy::Each, 1 << 20)).expect("it serves");
    let caller = Caller::new(&host);
    for (task, &stamp) in (0..).zip(&last) {
        assert_eq!(caller.get(task), [stamp, 14], "task {task}");
    }
}

#[test]
fn records_of_a_mebibyte_and_more_are_stored_and_an_incomplete_one_is_cut_off() {
    const THREADS: u64 = 4;
    const PUTS: u64 = 6;
    /// Words of a value of 1 MiB, the longest key and a header.
    const WORDS: u64 = ((1 << 20) + 4096 + 64) / 8;
    let folder = tempfile::tempdir().expect("a folder");
    let host = start(options(folder.path(), SyncPolicy::Each, 1 << 30)).expect("it serves");
    create(&host);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let host = &host;
            scope.spawn(move || {
                let caller = Caller::new(host);
                for put in 1..=PUTS {
                    caller.ask(ledger::Ask::PutLong(thread, put, WORDS)).expect("stored");
                }
            });
        }
    });
    let numbers = |host: &Host| match host.ask(Ask::StoreStat { name: "s".into() }, DEADLINE) {
        Ok(Answer::StoreStat(stat)) => stat.service,
        other => panic!("{other:?}"),
    };
    let stat = numbers(&host);
    let bytes = THREADS * PUTS * (WORDS + 3) * 8;
    assert_eq!((stat["log_records"], stat["log_record_bytes"]), (THREADS * PUTS, bytes));
    assert_eq!((stat["log_failed_writes"], stat["log_replayed_records"]), (0, 0));
    assert!((1..=THREADS * PUTS).contains(&stat["log_syncs"]), "{stat:?}");
    drop(host);
    let head = size_of_log(folder.path()) - stat["log_file_bytes"];
    assert!(head < 1024, "a new file's head of {head} bytes does not count");
    // As if the machine had crashed in the middle of one more write.
    let log = log_file(folder.path());
    let mut file = std::fs::read(&log).expect("the log's file");
    let whole = file.len();
    file.extend_from_within(whole - (1 << 20)..);
    std::fs::write(&log, &file).expect("written");
    let host = start(options(folder.path(), SyncPolicy::Each, 1 << 30)).expect("it serves");
    let caller = Caller::new(&host);
    for thread in 0..THREADS {
        assert_eq!(caller.get(thread)[1], PUTS);
    }
    assert_eq!(std::fs::metadata(&log).expect("the log's file").len(), whole as u64, "the rest was cut off");
    assert_eq!(numbers(&host)["log_replayed_records"], THREADS * PUTS);
}

/// Starts a node with a memory file.
fn start_file(file: &Path, options: Options) -> Result<Host, BindError> {
    let (memory, found) = Mapping::open(file, 16 << 20).expect("a memory file");
    let options = Options { take_over: found == Found::Memory, ..options };
    Host::start(memory, vec![Box::new(Ledger::default()) as Box<dyn Kind<Mapping>>], options)
}

#[test]
fn a_log_is_replayed_into_a_memory_file_and_begun_for_a_store_that_had_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, logs) = (folder.path().join("memory"), folder.path().join("logs"));
    let host = start_file(&file, Options::default()).expect("it serves");
    create(&host);
    Caller::new(&host).put(1, 10).expect("without a log");
    drop(host);
    let host = start_file(&file, options(&logs, SyncPolicy::Each, 1 << 20)).expect("it serves");
    Caller::new(&host).put(2, 20).expect("stored");
    let began = Instant::now();
    while !log_file(&logs).with_file_name("checkpoint.00000002").exists() {
        assert!(began.elapsed() < DEADLINE, "a checkpoint stores what is older than the log");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    drop(host);
    let host = start_file(&file, options(&logs, SyncPolicy::Each, 1 << 20)).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(1)[1], caller.get(2)[1]), (10, 20));
    assert!(caller.put(1, 11).expect("stored") > caller.get(2)[0]);
    drop(host);
    // The memory is lost.
    std::fs::remove_file(&file).expect("the memory file");
    let host = start_file(&file, options(&logs, SyncPolicy::Each, 1 << 20)).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(1)[1], caller.get(2)[1]), (11, 20));
    drop(host);
    // A log of another store with the name is not mixed with the memory's.
    let other = folder.path().join("other");
    let host = start_file(&other, Options::default()).expect("it serves");
    create(&host);
    drop(host);
    let refused = start_file(&other, options(&logs, SyncPolicy::Each, 1 << 20)).err().expect("another store");
    assert!(refused.to_string().contains("the memory has another store 's'"), "{refused}");
}

fn store_of(host: &Host) -> Store {
    match host.ask(Ask::OpenStore { name: "s".into() }, DEADLINE) {
        Ok(Answer::Store(store)) => store,
        other => panic!("{other:?}"),
    }
}

/// Changes a memory file that no node serves: the register of a key, and whether it says that the machine has been
/// started anew since.
fn change_file(file: &Path, table_at: u64, key: u64, [stamp, value]: [u64; 2], is_other_boot: bool) {
    let (memory, _) = Mapping::open(file, 16 << 20).expect("a memory file");
    let register = [stamp.to_le_bytes(), value.to_le_bytes()].concat();
    let Ok(()) = memory.write(table_at + 16 + key * 16, &register);
    if is_other_boot {
        let Ok(()) = memory.write(header::BOOT_AT, &[1; 16]);
    }
}

/// A value that no put has stored. Its stamp is later than those of all puts.
const FORGED: [u64; 2] = [999_999, 5];

fn wait_for_checkpoint(folder: &Path) {
    let began = Instant::now();
    let is_there = || {
        let files =
            std::fs::read_dir(log_file(folder).parent().expect("a folder")).expect("a folder").flatten();
        let names: Vec<_> = files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
        names.iter().any(|name| name.starts_with("checkpoint.") && name != "checkpoint.new")
    };
    while !is_there() {
        assert!(began.elapsed() < DEADLINE, "a checkpoint stores what the log lacks");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// A folder with the memory file of a node and its logs.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().expect("a folder"))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Options of a node with logs.
    fn logged(&self) -> Options {
        options(&self.at("logs"), SyncPolicy::Each, 1 << 20)
    }

    /// Starts a node with the memory file and logs, and creates the store. Returns the node and the table's address.
    fn create(&self) -> (Host, u64) {
        let host = start_file(&self.at("memory"), self.logged()).expect("it serves");
        create(&host);
        let at = store_of(&host).table_at;
        (host, at)
    }
}

#[test]
fn a_memory_file_is_believed_only_if_it_has_all_that_its_log_has() {
    let files = Files::new();
    let (file, old, logs) = (files.at("memory"), files.at("old"), files.at("logs"));
    let logged = || files.logged();
    let (host, at) = files.create();
    let caller = Caller::new(&host);
    for key in 0..10 {
        caller.put(key, 10 + key).expect("stored");
    }
    let key = key_of(&host);
    drop(host);
    std::fs::copy(&file, &old).expect("copied");
    // The machine crashes, and a page of the memory file does not reach the disk.
    change_file(&file, at, 1, [0, 0], true);
    change_file(&file, at, 3, FORGED, true);
    let host = start_file(&file, logged()).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(1)[1], caller.get(3)[1]), (11, 13), "the log has what the memory lost");
    assert_ne!(key_of(&host), key, "clients open the store again");
    caller.put(2, 22).expect("stored");
    drop(host);
    // An old copy of the memory, of the same boot.
    change_file(&old, at, 3, FORGED, false);
    let host = start_file(&old, logged()).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(2)[1], caller.get(3)[1]), (22, 13), "the log is newer than the memory");
    drop(host);
    // The replay ends in the middle.
    let log = log_file(&logs);
    let whole = std::fs::read(&log).expect("the log's file");
    let mut damaged = whole.clone();
    damaged[whole.len() - 4 * 52 - 5] ^= 1;
    std::fs::write(&log, &damaged).expect("written");
    let fresh = files.at("fresh");
    let refused = start_file(&fresh, logged()).err().expect("a record is damaged").to_string();
    assert!(refused.contains("is damaged"), "{refused}");
    let refused = start_file(&fresh, Options::default()).err().expect("a part is missing").to_string();
    assert!(refused.contains("incomplete") && refused.contains("--log-dir"), "{refused}");
    std::fs::write(&log, &whole).expect("written");
    change_file(&fresh, at, 3, FORGED, false);
    let host = start_file(&fresh, logged()).expect("it serves");
    let caller = Caller::new(&host);
    let values: Vec<u64> = (0..10).map(|key| caller.get(key)[1]).collect();
    assert_eq!(values, [10, 11, 22, 13, 14, 15, 16, 17, 18, 19], "the replay begins anew");
    drop(host);
    // The memory has all that was answered.
    change_file(&fresh, at, 3, FORGED, false);
    let host = start_file(&fresh, logged()).expect("it serves");
    assert_eq!(Caller::new(&host).get(3), FORGED, "a memory that belongs to the log is believed");
}

#[test]
fn a_log_that_was_begun_for_a_memory_file_gets_its_checkpoint_whatever_fails_before() {
    let files = Files::new();
    let (file, logs) = (files.at("memory"), files.at("logs"));
    let logged = || files.logged();
    let host = start_file(&file, Options::default()).expect("it serves");
    create(&host);
    Caller::new(&host).put(1, 10).expect("without a log");
    let store = store_of(&host);
    drop(host);
    // The file of the checkpoint cannot be made.
    let in_the_way = logs.join(folder_of(&store)).join("checkpoint.new");
    std::fs::create_dir_all(&in_the_way).expect("a folder");
    let host = start_file(&file, logged()).expect("it serves");
    Caller::new(&host).put(2, 20).expect("stored");
    std::thread::park_timeout(Duration::from_millis(300));
    drop(host);
    std::fs::remove_dir(&in_the_way).expect("it is empty");
    // The machine crashes: the log alone does not have the store's contents.
    change_file(&file, store.table_at, 3, FORGED, true);
    let host = start_file(&file, logged()).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(1)[1], caller.get(2)[1], caller.get(3)), (10, 20, FORGED));
    wait_for_checkpoint(&logs);
    drop(host);
    std::fs::remove_file(&file).expect("the memory file");
    let host = start_file(&file, logged()).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(1)[1], caller.get(2)[1]), (10, 20), "the checkpoint has all contents");
}

#[test]
fn a_store_whose_creation_did_not_reach_the_memory_file_is_created_from_its_log() {
    let files = Files::new();
    let file = files.at("memory");
    drop(start_file(&file, files.logged()).expect("it serves"));
    let before = std::fs::read(&file).expect("the memory file");
    let (host, at) = files.create();
    Caller::new(&host).put(1, 10).expect("stored");
    drop(host);
    // The machine crashes, and no page of the memory file has reached the disk.
    std::fs::write(&file, before).expect("written");
    change_file(&file, at, 1, [0, 0], true);
    let host = start_file(&file, files.logged()).expect("it serves");
    assert_eq!(Caller::new(&host).get(1)[1], 10);
}

#[test]
fn a_memory_that_was_served_without_its_log_is_newer_than_the_log() {
    let files = Files::new();
    let (file, old, logs) = (files.at("memory"), files.at("old"), files.at("logs"));
    let logged = || files.logged();
    let (host, at) = files.create();
    let caller = Caller::new(&host);
    for key in 0..3 {
        caller.put(key, 10).expect("stored");
    }
    drop(host);
    let host = start_file(&file, Options::default()).expect("it serves");
    Caller::new(&host).put(5, 50).expect("without the log");
    drop(host);
    std::fs::copy(&file, &old).expect("copied");
    // A delete whose trace is gone: the log has the key, and its replay would bring it back.
    change_file(&file, at, 1, [0, 0], false);
    let host = start_file(&file, logged()).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(1), caller.get(5)[1]), ([0, 0], 50));
    caller.put(6, 60).expect("stored");
    wait_for_checkpoint(&logs);
    drop(host);
    // Another copy of the memory goes its own way.
    let refused = start_file(&old, logged()).err().expect("both have changes").to_string();
    assert!(refused.contains("each has changes that the other one lacks"), "{refused}");
    std::fs::remove_file(&file).expect("the memory file");
    let host = start_file(&file, logged()).expect("it serves");
    let caller = Caller::new(&host);
    let values: Vec<u64> = [0, 1, 5, 6].iter().map(|&key| caller.get(key)[1]).collect();
    assert_eq!(values, [10, 0, 50, 60], "the log has what the memory had");
}

/// The folders in a folder, in the order of their names.
fn folders_in(folder: &Path) -> Vec<String> {
    let entries =
        std::fs::read_dir(folder).expect("a folder").flatten().filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder").flatten() {
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).expect("copied")),
        }
    }
}

#[test]
fn a_dropped_store_stays_dropped_although_it_was_once_created_from_its_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, logs, before) =
        (folder.path().join("memory"), folder.path().join("logs"), folder.path().join("before"));
    let logged = || options(&logs, SyncPolicy::Each, 1 << 20);
    let host = start_file(&file, logged()).expect("it serves");
    create(&host);
    drop(host);
    std::fs::remove_file(&file).expect("the memory file");
    let host = start_file(&file, logged()).expect("it serves");
    let own = folder_of(&store_of(&host));
    copy_folder(&logs, &before);
    host.ask(Ask::DropStore { name: "s".into() }, DEADLINE).expect("dropped");
    drop(host);
    // As if the node had died after it had recorded the drop, and before it removed the log.
    std::fs::remove_dir_all(&logs).expect("the logs");
    std::fs::rename(&before, &logs).expect("renamed");
    let host = start_file(&file, logged()).expect("it serves");
    let opened = host.ask(Ask::OpenStore { name: "s".into() }, DEADLINE);
    assert!(opened.is_err(), "{opened:?}");
    assert_eq!(folders_in(&logs), [format!("{own}.aside")], "its log is kept, and is no store's");
    drop(host);
    let host = start_file(&file, logged()).expect("it serves");
    create(&host);
    assert_eq!(Caller::new(&host).get(1), [0, 0]);
}

#[test]
fn the_log_of_a_store_that_is_newer_than_the_memory_is_set_aside() {
    let files = Files::new();
    let (file, logs) = (files.at("memory"), files.at("logs"));
    drop(start_file(&file, files.logged()).expect("it serves"));
    let before = std::fs::read(&file).expect("the memory file");
    let mut expected = Vec::new();
    for _ in 0..2 {
        let (host, _) = files.create();
        Caller::new(&host).put(1, 10).expect("stored");
        let own = folder_of(&store_of(&host));
        drop(host);
        // An operator restores a copy of the memory file that is older than the store.
        std::fs::write(&file, &before).expect("written");
        let host = start_file(&file, files.logged()).expect("it serves");
        assert!(host.ask(Ask::OpenStore { name: "s".into() }, DEADLINE).is_err(), "the memory lacks it");
        expected.push(own);
        expected.sort_unstable();
        let aside: Vec<String> = expected.iter().map(|own| format!("{own}.aside")).collect();
        assert_eq!(folders_in(&logs), aside);
    }
    // The operator wants the newer store after all.
    let own = &expected[0];
    let rename = |from: &str, to: &str| std::fs::rename(logs.join(from), logs.join(to)).expect("renamed");
    rename(&format!("{own}.aside"), own);
    drop(start_file(&file, files.logged()).expect("it serves"));
    assert!(
        folders_in(&logs).contains(&format!("{own}.aside")),
        "with the old memory, it is set aside again"
    );
    copy_folder(&logs.join(format!("{own}.aside")), &logs.join(own));
    drop(start_file(&file, files.logged()).expect("it serves"));
    assert!(folders_in(&logs).contains(&format!("{own}.aside-2")), "no other is overwritten");
    rename(&format!("{own}.aside"), own);
    let host = start_file(&files.at("fresh"), files.logged()).expect("it serves");
    assert_eq!(Caller::new(&host).get(1)[1], 10, "nothing of it is lost");
}

#[test]
fn a_memory_is_not_emptied_for_a_log_that_cannot_be_read() {
    let files = Files::new();
    let (file, logs) = (files.at("memory"), files.at("logs"));
    let (host, at) = files.create();
    let caller = Caller::new(&host);
    for key in 0..10 {
        caller.put(key, 10 + key).expect("stored");
    }
    drop(host);
    let log = log_file(&logs);
    let whole = std::fs::read(&log).expect("the log's file");
    let mut damaged = whole.clone();
    damaged[whole.len() - 4 * 52 - 5] ^= 1;
    let read = format::read::<std::io::Error>(&Bytes(whole.clone()), |_, _| Ok(()));
    let contents = read.expect("no error").expect("a head");
    let mut foreign = whole.clone();
    format::put_frame(&mut foreign, contents.salt, contents.next, 0, b"of another release");
    // After a crash of the machine, the log is believed.
    change_file(&file, at, 3, FORGED, true);
    let before = std::fs::read(&file).expect("the memory file");
    for (unreadable, reason) in [(damaged, "is damaged"), (foreign, "cannot replay record")] {
        std::fs::write(&log, &unreadable).expect("written");
        let refused = match start_file(&file, files.logged()) {
            Err(refused) => refused.to_string(),
            Ok(host) => {
                let opened = host.ask(Ask::OpenStore { name: "s".into() }, DEADLINE);
                opened.expect_err("the store is refused").to_string()
            }
        };
        assert!(refused.contains(reason), "{refused}");
        // The operator gives the log up.
        let host = start_file(&file, Options::default()).expect("the memory has what it had");
        let caller = Caller::new(&host);
        assert_eq!((caller.get(1)[1], caller.get(3)), (11, FORGED));
        drop(host);
        std::fs::write(&file, &before).expect("written");
    }
    // A log that is whole is believed.
    std::fs::write(&log, &whole).expect("written");
    let host = start_file(&file, files.logged()).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(1)[1], caller.get(3)[1]), (11, 13));
}

#[test]
fn a_folder_serves_one_node_and_a_dropped_store_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let host = start(options(folder.path(), SyncPolicy::Each, 4096)).expect("it serves");
    let refused = start(options(folder.path(), SyncPolicy::Each, 4096)).err().expect("the folder is in use");
    assert!(refused.to_string().contains("another node uses the folder"), "{refused}");
    create(&host);
    Caller::new(&host).put(1, 1).expect("stored");
    host.ask(Ask::DropStore { name: "s".into() }, DEADLINE).expect("dropped");
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").flatten().collect();
    assert_eq!(left.len(), 1, "only the lock is left: {left:?}");
    drop(host);
    let host = start(options(folder.path(), SyncPolicy::Each, 4096)).expect("it serves");
    let opened = host.ask(Ask::OpenStore { name: "s".into() }, DEADLINE);
    assert!(opened.is_err(), "{opened:?}");
}

/// Size of the files of the only log in a folder, in bytes.
fn size_of_log(folder: &Path) -> u64 {
    let store = log_file(folder);
    let files = std::fs::read_dir(store.parent().expect("the store's folder")).expect("a folder").flatten();
    // A checkpoint may remove a file in the meantime.
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

/// The first file of the only log in a folder.
fn log_file(folder: &Path) -> PathBuf {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    let store = entries.map(|entry| entry.path()).find(|path| path.is_dir()).expect("the store's folder");
    store.join("log.00000001")
}

#[test]
fn a_torn_tail_is_cut_and_a_damaged_record_refused_with_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let host = start(options(folder.path(), SyncPolicy::Each, 1 << 20)).expect("it serves");
    create(&host);
    let caller = Caller::new(&host);
    for put in 0..10 {
        caller.put(put, put).expect("stored");
    }
    drop(host);
    let file = log_file(folder.path());
    let whole = std::fs::read(&file).expect("a file");
    std::fs::write(&file, &whole[..whole.len() - 3]).expect("written");
    let host = start(options(folder.path(), SyncPolicy::Each, 1 << 20)).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(8)[1], caller.get(9)), (8, [0, 0]));
    drop(host);
    let mut damaged = whole.clone();
    let at = whole.len() - 3 * 52 - 5;
    damaged[at] ^= 1;
    std::fs::write(&file, &damaged).expect("written");
    let refused =
        start(options(folder.path(), SyncPolicy::Each, 1 << 20)).err().expect("a record is damaged");
    let refused = refused.to_string();
    let place = whole.len() - 4 * 52;
    assert!(refused.contains(&format!("'truncate -s {place}'")), "{refused}");
    std::fs::write(&file, &whole[..place]).expect("written");
    let host = start(options(folder.path(), SyncPolicy::Each, 1 << 20)).expect("it serves");
    let caller = Caller::new(&host);
    assert_eq!((caller.get(5)[1], caller.get(6)), (5, [0, 0]));
}

/// The bytes of a file.
struct Bytes(Vec<u8>);

impl format::Source for Bytes {
    fn read_at(&self, at: u64, out: &mut [u8]) -> std::io::Result<usize> {
        let rest = self.0.get(at as usize..).unwrap_or_default();
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }
}

#[test]
fn a_store_whose_log_cannot_be_replayed_is_refused_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let logged = || options(folder.path(), SyncPolicy::Each, 1 << 20);
    let host = start(logged()).expect("it serves");
    create(&host);
    Caller::new(&host).put(1, 10).expect("stored");
    let file = log_file(folder.path());
    let (name, kind, parameters) = ("other".to_owned(), "ledger".to_owned(), String::new());
    let other = Ask::CreateStore { name: name.clone(), kind, parameters, quota: 4 << 20 };
    host.ask(other, DEADLINE).expect("created");
    drop(host);

    // Its frame is valid, and the service does not know the record.
    let whole = std::fs::read(&file).expect("a file");
    let read = format::read::<std::io::Error>(&Bytes(whole.clone()), |_, _| Ok(()));
    let contents = read.expect("no error").expect("a head");
    let mut foreign = whole.clone();
    format::put_frame(&mut foreign, contents.salt, contents.next, 0, b"of another release");
    std::fs::write(&file, &foreign).expect("written");
    let host = start(logged()).expect("it serves the other store");
    let open = |host: &Host, name: &str| host.ask(Ask::OpenStore { name: name.to_owned() }, DEADLINE);
    assert!(matches!(open(&host, &name), Ok(Answer::Store(_))));
    for ask in [Ask::OpenStore { name: "s".into() }, Ask::StoreStat { name: "s".into() }] {
        let refused = host.ask(ask, DEADLINE).expect_err("its log cannot be replayed").to_string();
        for part in ["store 's' is not served", "record 2", "log.00000001", "move the file's folder away"] {
            assert!(refused.contains(part), "no '{part}' in: {refused}");
        }
    }
    drop(host);
    assert_eq!(std::fs::read(&file).expect("a file"), foreign, "the file is left as it was");

    std::fs::write(&file, &whole).expect("written");
    let host = start(logged()).expect("it serves");
    assert_eq!(Caller::new(&host).get(1)[1], 10, "the store is served again");
    drop(host);

    // A store that is refused can be dropped, and another of its name be created.
    std::fs::write(&file, &foreign).expect("written");
    let host = start(logged()).expect("it serves the other store");
    host.ask(Ask::DropStore { name: "s".into() }, DEADLINE).expect("dropped");
    create(&host);
    assert_eq!(Caller::new(&host).get(1), [0, 0]);
}

// A node in a process of its own, which the test kills.

/// Name of the variable with the folder of the node's process.
const FOLDER: &str = "FARSIDE_TEST_LOG_NODE";

/// The process of the node. It is no test, but must be one to be run.
#[test]
#[ignore = "a process that another test starts"]
fn node_process() {
    #[allow(clippy::disallowed_methods, reason = "the test that starts this process names the folder by it")]
    let folder = std::env::var_os(FOLDER).map(PathBuf::from);
    let Some(folder) = folder else { return };
    let log = options(&folder.join("logs"), SyncPolicy::Each, 16 << 10).log;
    let options = Options { socket: Some(folder.join("socket")), log, ..Options::default() };
    let host = start(options).expect("it serves");
    if host.ask(Ask::OpenStore { name: "s".into() }, DEADLINE).is_err() {
        create(&host);
    }
    std::fs::write(folder.join("ready"), "").expect("written");
    std::thread::park();
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it was killed");
    }
}

fn start_process(folder: &Path) -> Killed {
    let ready = folder.join("ready");
    drop(std::fs::remove_file(&ready));
    let program = std::env::current_exe().expect("this test");
    let mut command = Command::new(program);
    command.args(["--exact", "log::node_process", "--ignored", "--nocapture"]).env(FOLDER, folder);
    let child = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().expect("it starts");
    let killed = Killed(child);
    let began = Instant::now();
    while !ready.exists() {
        assert!(began.elapsed() < DEADLINE, "the node starts");
        std::thread::park_timeout(Duration::from_millis(2));
    }
    killed
}

/// Puts rising values of one key until the node is killed. Says when it begins. Returns the last acknowledged value and
/// the last value that was asked for.
fn put_until_killed(socket: &Path, of: u64, from: u64, begins: &mpsc::Sender<()>) -> (u64, u64) {
    let client = shm::connect(socket, NODE).expect("it serves");
    let (mut request, mut answer) = (Vec::new(), Vec::new());
    let ask = serde_json::to_vec(&Ask::OpenStore { name: "s".into() }).expect("plain data");
    block_on(&client, client.call(NODE, ServiceId::NODE, &ask, &mut answer)).expect("the store is there");
    let Ok(Answer::Store(store)) = serde_json::from_slice(&answer) else { panic!("no store") };
    let key = store.extent().key;
    begins.send(()).expect("the test waits");
    let mut value = from;
    loop {
        let service = address(key, &mut request);
        ledger::Ask::Put(of, value + 1).encode(&mut request);
        if block_on(&client, client.call(NODE, service, &request, &mut answer)).is_err() {
            return (value, value + 1);
        }
        value += 1;
    }
}

#[test]
fn nothing_acknowledged_is_lost_when_the_process_is_killed() {
    const CLIENTS: u64 = 4;
    let folder = tempfile::tempdir().expect("a folder");
    let mut last = [(0, 0); CLIENTS as usize];
    for round in 0..12u32 {
        let process = start_process(folder.path());
        let socket = folder.path().join("socket");
        std::thread::scope(|scope| {
            let socket = &socket;
            let (begins, begun) = mpsc::channel();
            let clients: Vec<_> = (0..CLIENTS)
                .map(|of| {
                    let begins = begins.clone();
                    scope.spawn(move || put_until_killed(socket, of, last_of(&last, of), &begins))
                })
                .collect();
            (0..CLIENTS).for_each(|_| begun.recv_timeout(DEADLINE).expect("all clients begin"));
            // The kill strikes at another moment of the log in each round.
            std::thread::park_timeout(Duration::from_millis(20 + u64::from(round) * 7));
            drop(process);
            for (of, client) in clients.into_iter().enumerate() {
                last[of] = client.join().expect("no client panics");
            }
        });
        let log = options(&folder.path().join("logs"), SyncPolicy::Each, 16 << 10).log;
        let host = start(Options { log, ..Options::default() }).expect("it serves");
        let caller = Caller::new(&host);
        for (of, (acknowledged, asked)) in (0..).zip(&mut last) {
            let [_, value] = caller.get(of);
            assert!(
                (*acknowledged..=*asked).contains(&value),
                "round {round}, client {of}: {value}, but {acknowledged} was acknowledged and {asked} asked for"
            );
            *acknowledged = value;
        }
    }
    assert!(last.iter().all(|&(acknowledged, _)| acknowledged > 12), "every client made progress: {last:?}");
}

fn last_of(last: &[(u64, u64)], of: u64) -> u64 {
    last[of as usize].0
}

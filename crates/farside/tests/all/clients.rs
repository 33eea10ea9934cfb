//! Guarantees of the library's clients over every fabric.
//!
//! Invariant: every wait has a deadline, so that a test fails rather than hangs.

use crate::support::{Node, PATIENCE, Process, serve, until};
use farside::local::Client;
use farside::{Error, KvError, NewStore, Options, Pool, Ran, connect, connect_with};
use farside_node::access::Fingerprint;
use farside_remote::FabricError;
use std::cell::Cell;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// Runs `work` on a thread of its own; panics if it takes longer than [`PATIENCE`].
#[track_caller]
fn in_time<O: Send + 'static>(work: impl FnOnce() -> O + Send + 'static) -> O {
    let (done, outcome) = mpsc::channel();
    let thread = std::thread::spawn(move || done.send(work()));
    match outcome.recv_timeout(PATIENCE) {
        Ok(outcome) => outcome,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the work hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => unreachable!("the thread ended without sending its outcome"),
        },
    }
}

/// Starts a node that serves all fabrics but `tls`. Returns the node, the urls of these fabrics, and the folder of the
/// node's rings.
fn node_on_all_fabrics() -> (Node, Vec<String>, tempfile::TempDir) {
    let rings = tempfile::tempdir().expect("a folder");
    let ring = format!("ring:{}", rings.path().join("ring.sock").display());
    let listen = ["--listen", &ring, "--listen", "udp://127.0.0.1:0", "--listen", "tcp://127.0.0.1:0"];
    let memory = ["--memory", "96MiB", "--store", "default", "--quota", "48MiB"];
    let node = Node::with(&[&memory[..], &listen].concat());
    let mut urls = connect(&node.url()).expect("the node serves").info().expect("the node's info").listening;
    assert_eq!(urls.len(), 3, "{urls:?}");
    urls.extend([node.url(), "local:".to_owned()]);
    (node, urls, rings)
}

/// Returns items to put: more items than fit into one chain, one value of several parts, and one key that occurs twice.
fn items() -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut items: Vec<_> = (0..150u32).map(|n| (n.to_be_bytes().to_vec(), vec![n as u8; 700])).collect();
    items.push((b"large".to_vec(), vec![7; 150_000]));
    items.push((0u32.to_be_bytes().to_vec(), b"later".to_vec()));
    items
}

/// Returns the keys of [`items`] with their values after the puts, and one absent key.
fn expected() -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let mut expected: Vec<_> = items().into_iter().map(|(key, value)| (key, Some(value))).collect();
    expected[0].1 = Some(b"later".to_vec());
    expected.push((b"absent".to_vec(), None));
    expected
}

#[test]
fn batches_are_put_and_got_over_every_fabric() {
    let (_node, urls, _rings) = node_on_all_fabrics();
    for url in urls {
        in_time(move || {
            let pool = connect(&url).unwrap_or_else(|error| panic!("{url}: {error}"));
            let store = pool.open("default").expect("a store");
            for (key, _) in expected() {
                store.delete(key).wait().expect("deleted, if another fabric's round stored it");
            }
            local_puts_and_gets(&pool, &url);
            let client = pool.open("default").expect("a store");
            client.delete(b"large").wait().expect("deleted");
            client.put_many(items()).wait().unwrap_or_else(|error| panic!("{url}: {error}"));
            let got = client.get_many(expected().into_iter().map(|(key, _)| key)).wait();
            let got = got.unwrap_or_else(|error| panic!("{url}: {error}"));
            for ((key, value), got) in expected().into_iter().zip(got) {
                assert_eq!(got.map(|got| got.value), value, "{url}: {key:?}");
            }
        });
    }
}

fn local_puts_and_gets(pool: &Pool, url: &str) {
    let mut client = Client::open(pool, "default").expect("a store");
    let items = items();
    let items: Vec<(&[u8], &[u8])> = items.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    client.put_many(&items).unwrap_or_else(|error| panic!("{url}: {error}"));
    let expected = expected();
    let keys: Vec<&[u8]> = expected.iter().map(|(key, _)| &key[..]).collect();
    let mut got = vec![None; keys.len()];
    let visited = client.get_many(&keys, |place, item| {
        assert!(got[place].is_none(), "{url}: each place is visited once");
        got[place] = Some(item.map(|item| item.value.to_vec()));
    });
    visited.unwrap_or_else(|error| panic!("{url}: {error}"));
    for ((key, value), got) in expected.iter().zip(&got) {
        assert_eq!(got.as_ref(), Some(value), "{url}: {key:?}");
    }
}

#[test]
fn batches_are_refused_by_stores_that_do_not_support_them() {
    let pool = connect("local:").expect("a node");
    let pilaf = NewStore { kind: "pilaf".into(), ..NewStore::prism_kv("calls", 4 << 20) };
    pool.create_store(&pilaf).expect("the node has memory");
    let mut client = Client::open(&pool, "calls").expect("a store");
    let refused = [
        client.get_many(&[b"k"], |_, _| panic!("nothing was read")).expect_err("refused"),
        client.put_many(&[(b"k", b"v")]).expect_err("refused"),
    ];
    for error in refused {
        assert!(matches!(error, KvError::Unsupported { .. }) && error.ran() == Ran::No, "{error}");
    }
    let client = pool.open("calls").expect("a store");
    let refused = [
        client.get_many([b"k"]).wait().map(drop).expect_err("refused"),
        client.put_many([(b"k", b"v")]).wait().expect_err("refused"),
    ];
    for error in refused {
        assert!(matches!(error, Error::Kv(KvError::Unsupported { .. })) && error.ran() == Ran::No, "{error}");
    }
}

/// Starts a node with memory file `file` and its socket in `folder`.
fn node_of(file: &str, folder: &std::path::Path, more: &[&str], log: &str) -> Process {
    let arguments = [&["--memory-file", file], more].concat();
    serve(&folder.join("node.sock"), &arguments, folder.join(log))
}

const FRESH: [&str; 4] = ["--memory", "32MiB", "--store", "default"];

#[test]
fn batches_are_retried_over_another_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("memory").display().to_string();
    let mut first =
        node_of(&file, folder.path(), &[&FRESH[..], &["--listen", "tcp://127.0.0.1:0"]].concat(), "first");
    assert!(first.line().contains("serves"));
    let shm = format!("shm:{}", folder.path().join("node.sock").display());
    let url = connect(&shm).expect("the node serves").info().expect("the node's info").listening[0].clone();
    let mut clients = [(); 2].map(|()| {
        let pool = connect(&url).expect("the node serves");
        let mut client = Client::open(&pool, "default").expect("a store");
        client.put_many(&[(b"a", b"1"), (b"b", b"2")]).expect("stored");
        client
    });
    first.kill();
    for client in &mut clients {
        client.get(b"a").map(drop).expect_err("the node is dead");
    }
    let second = node_of(&file, folder.path(), &["--listen", &url], "second");
    assert!(second.line().contains("serves"));
    let [reader, writer] = &mut clients;
    let mut got = Vec::new();
    let visit = |place: usize, item: Option<farside_systems::kv::Item<'_>>| {
        got.push((place, item.map(|item| item.value.to_vec())));
    };
    reader.get_many(&[b"a", b"b"], visit).expect("read over another session");
    assert_eq!(got, [(0, Some(b"1".to_vec())), (1, Some(b"2".to_vec()))]);
    writer.put_many(&[(b"a", b"3"), (b"b", b"4")]).expect("stored over another session");
    assert_eq!(reader.get(b"b").expect("read").expect("present").value, b"4");
}

#[test]
fn dropping_a_dead_nodes_clients_permits_the_next_node() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("memory").display().to_string();
    let mut first = node_of(&file, folder.path(), &FRESH, "first");
    assert!(first.line().contains("serves"));
    let pool =
        connect(&format!("shm:{}", folder.path().join("node.sock").display())).expect("the node serves");
    let mut kept = Client::open(&pool, "default").expect("a store");
    let (mut local, client) =
        (Client::open(&pool, "default").expect("a store"), pool.open("default").expect("a store"));
    for n in 0..100u32 {
        local.put(&n.to_be_bytes(), b"older").expect("stored");
        client.put(n.to_be_bytes(), b"before").wait().expect("stored");
    }
    kept.put(b"key", b"before").expect("stored");
    first.kill();
    until("the client sees that the node died", || {
        matches!(kept.get(b"key").map(drop), Err(KvError::Fabric(FabricError::NodeDied(_))))
    });
    let died = kept.get(b"key").map(drop).expect_err("as just seen");
    assert!(died.to_string().contains("drop all clients of the node"), "{died}");
    drop((local, client));
    // One of the three sessions is still open, so its client could still use the memory.
    let mut refused = node_of(&file, folder.path(), &[], "refused");
    assert_eq!(refused.ended(), Some(2));
    let own = std::process::id().to_string();
    assert!(refused.log().contains(&own) && refused.log().contains("drop its clients"), "{}", refused.log());

    drop(kept);
    // The thread of a `farside::Client` exits asynchronously after the drop.
    let mut second = None;
    until("the next node serves", || {
        let node = node_of(&file, folder.path(), &[], "second");
        second = node.line_if_any().map(|_| node);
        second.is_some()
    });
    let _second = second.expect("as in the loop above");
    let mut again = Client::open(&pool, "default").expect("the same store");
    assert_eq!(again.get(b"key").expect("read").expect("present").value, b"before");
    for n in 0..100u32 {
        assert_eq!(again.get(&n.to_be_bytes()).expect("read").expect("present").value, b"before");
    }
    again.put(b"key", b"after").expect("stored");
}

/// Nodes with memory files and engines of all kinds but `tls`, in a folder.
struct Several<'a> {
    folder: &'a Path,
    started: Cell<u32>,
}

impl Several<'_> {
    fn new(folder: &Path) -> Several<'_> {
        Several { folder, started: Cell::new(0) }
    }

    fn start(&self, number: usize, listen: &[String], fresh: &[&str]) -> Process {
        let file = self.folder.join(format!("memory-{number}")).display().to_string();
        let listen: Vec<&str> = listen.iter().flat_map(|url| ["--listen", url]).collect();
        let arguments = [&["--memory-file", &file], &listen[..], fresh].concat();
        let log = format!("log-{}", self.started.replace(self.started.get() + 1));
        let node = serve(&self.socket(number), &arguments, self.folder.join(log));
        assert!(node.line().contains("serves"));
        node
    }

    fn socket(&self, number: usize) -> PathBuf {
        self.folder.join(format!("{number}.sock"))
    }

    /// Urls at which a node may listen for the first time.
    fn anywhere(&self, number: usize) -> [String; 3] {
        let ring = format!("ring:{}", self.folder.join(format!("{number}.ring")).display());
        ["tcp://127.0.0.1:0".to_owned(), "udp://127.0.0.1:0".to_owned(), ring]
    }

    /// Urls at which a node listens.
    fn listening(&self, number: usize) -> Vec<String> {
        let node = connect(&format!("shm:{}", self.socket(number).display())).expect("it serves");
        node.info().expect("its info").listening
    }
}

/// Every task of a client still has the key that an ended session had granted.
#[test]
fn all_tasks_of_a_client_use_a_node_of_several_that_came_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let nodes = Several::new(folder.path());
    let fresh = ["--memory", "32MiB"];
    let [mut first, _second] = [0, 1].map(|number| nodes.start(number, &nodes.anywhere(number), &fresh));
    let [of_first, of_second] = [0, 1].map(|number| nodes.listening(number));
    let pools = of_first.iter().zip(&of_second).map(|(first, second)| [&first[..], second]);
    let pools: Vec<[&str; 2]> = pools.collect();
    let keys: Vec<String> = (0..256).map(|n| format!("key{n}")).collect();
    let clients: Vec<_> = pools
        .iter()
        .enumerate()
        .map(|(number, urls)| {
            let name = format!("store{number}");
            let pool = connect(&urls.join(",")).expect("the nodes serve");
            pool.create_store(&NewStore::prism_kv(&name, 8 << 20)).expect("the nodes have memory");
            let client = pool.open(&name).expect("a store");
            let puts: Vec<_> = keys.iter().map(|key| client.put(&key[..], "value")).collect();
            puts.into_iter().for_each(|put| put.wait().expect("stored"));
            client
        })
        .collect();
    first.kill();
    let _again = nodes.start(0, &of_first, &[]);
    for (client, urls) in clients.iter().zip(&pools) {
        until(&format!("all keys are read at the same time over {}", urls[0]), || {
            let gets: Vec<_> = keys.iter().map(|key| client.get(&key[..])).collect();
            let got: Vec<_> = gets.into_iter().map(farside::Pending::wait).collect();
            got.iter().all(|got| got.as_ref().is_ok_and(Option::is_some))
        });
    }
}

#[test]
fn a_client_of_several_nodes_never_switches_to_another_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let nodes = Several::new(folder.path());
    let fresh = ["--memory", "16MiB"];
    let [mut first, _second] = [0, 1].map(|number| nodes.start(number, &nodes.anywhere(number), &fresh));
    let urls = [0, 1].map(|number| nodes.listening(number));
    let pool = connect(&format!("{},{}", urls[0][0], urls[1][0])).expect("the nodes serve");
    let create_on_first = || {
        let first = connect(&urls[0][0]).expect("the node serves");
        first.create_store(&NewStore::prism_kv("s", 4 << 20)).expect("the node has memory");
    };
    create_on_first();
    let client = pool.open("s").expect("a store");
    client.put("key", "value").wait().expect("stored");
    first.kill();
    std::fs::remove_file(folder.path().join("memory-0")).expect("its memory");
    let _other = nodes.start(0, &urls[0], &fresh);
    create_on_first();
    until("the client meets the other store", || {
        let error = client.get("key").wait().expect_err("the value is lost");
        error.to_string().contains("was replaced by a new store")
    });
    let error = client.put("key", "value").wait().expect_err("the store is gone");
    assert!(error.to_string().contains("was replaced by a new store"), "{error}");
}

#[test]
fn an_idle_client_of_several_nodes_drops_its_session_with_a_dead_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let nodes = Several::new(folder.path());
    let [mut first, _second] = [0, 1].map(|number| nodes.start(number, &[], &["--memory", "16MiB"]));
    let urls = [0, 1].map(|number| format!("shm:{}", nodes.socket(number).display()));
    let pool = connect(&urls.join(",")).expect("the nodes serve");
    pool.create_store(&NewStore::prism_kv("s", 8 << 20)).expect("the nodes have memory");
    let client = pool.open("s").expect("a store");
    let keys: Vec<String> = (0..32).map(|n| format!("key{n}")).collect();
    keys.iter().for_each(|key| client.put(&key[..], "value").wait().expect("stored"));
    first.kill();
    let file = folder.path().join("memory-0").display().to_string();
    let mut again = None;
    until("the next node takes over", || {
        let node = serve(&nodes.socket(0), &["--memory-file", &file], folder.path().join("again"));
        again = node.line_if_any().map(|_| node);
        again.is_some()
    });
    until("all keys are read", || {
        keys.iter().all(|key| client.get(&key[..]).wait().is_ok_and(|got| got.is_some()))
    });
}

/// A node locks out addresses from which several wrong tokens come.
#[test]
fn a_node_that_refuses_the_token_is_not_asked_again_at_once() {
    const TOKEN: &str = "the right token of one node";
    let files = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = files.path().join(name);
        std::fs::write(&path, text).expect("a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("its mode");
        path.display().to_string()
    };
    let entry = |token: &str| {
        let sha256 = serde_json::to_value(Fingerprint::of(token.as_bytes())).expect("plain data");
        format!("[[token]]\nname = 'all'\nsha256 = {sha256}\nadmin = true\nstores = {{ '*' = 'all' }}\n")
    };
    let start = |tokens: &str| {
        let listen = ["--listen", "tcp://127.0.0.1:0", "--shm-trusts-all", "--tokens", tokens];
        Node::with(&[&["--memory", "16MiB"], &listen[..]].concat())
    };
    let nodes = [start(&file("first", &entry(TOKEN))), start(&file("second", &entry("another")))];
    let urls = nodes.each_ref().map(|node| {
        let info = connect(&node.url()).expect("the node serves").info().expect("the node's info");
        info.listening[0].clone()
    });
    let token = || Some(TOKEN.to_owned());
    let options = || Options { token: token(), ..Options::default() };
    let pool = connect_with(&urls.join(","), &options()).expect("one node accepts the token");
    pool.create_store(&NewStore { members: Some(1), ..NewStore::prism_kv("s", 4 << 20) })
        .expect_err("a node may have a store of this name");
    connect_with(&urls[0], &options())
        .expect("the node accepts the token")
        .create_store(&NewStore::prism_kv("s", 4 << 20))
        .expect("the node has memory");
    let client = pool.open("s").expect("a store on the first node");
    std::thread::sleep(Duration::from_millis(1500));
    client.put("key", "value").wait().expect("stored");
    let refusals = connect(&nodes[1].url()).expect("the node serves").info().expect("its info").refusals;
    assert!(refusals.bad_tokens <= 2, "{refusals:?}");
    assert_eq!(refusals.locked_out, 0);
}

/// Items of one client, in a store over several nodes, each item a register that this client alone writes.
struct Registers<'a> {
    client: &'a farside::Client,
    /// Key, last value that was stored for sure, and last value that may be stored.
    items: Vec<(String, u64, u64)>,
}

impl Registers<'_> {
    /// Writes all items at the same time, then reads them. Returns whether all operations succeeded.
    fn write_and_read(&mut self, value: u64) -> bool {
        let put = |(key, ..): &(String, u64, u64)| self.client.put(&key[..], value.to_string());
        let puts: Vec<_> = self.items.iter().map(put).collect();
        let mut is_whole = true;
        for ((_, stored, maybe), put) in self.items.iter_mut().zip(puts) {
            match put.wait() {
                Ok(()) => (*stored, *maybe) = (value, value),
                Err(error) => {
                    is_whole = false;
                    *maybe = if error.ran() == Ran::No { *maybe } else { value };
                }
            }
        }
        let gets: Vec<_> = self.items.iter().map(|(key, ..)| self.client.get(&key[..])).collect();
        for ((key, stored, maybe), get) in self.items.iter_mut().zip(gets) {
            let Ok(got) = get.wait() else {
                is_whole = false;
                continue;
            };
            let text = got.map_or_else(|| "0".into(), |got| String::from_utf8(got.value).expect("a number"));
            let found: u64 = text.parse().expect("a number");
            assert!((*stored..=*maybe).contains(&found), "{key} is {found}, not {stored} to {maybe}");
            *stored = found;
        }
        is_whole
    }
}

#[test]
#[ignore = "takes 20 s: cargo xtask soak"]
fn soak_clients_of_several_nodes_lose_nothing_while_nodes_are_killed() {
    let folder = tempfile::tempdir().expect("a folder");
    let nodes = Several::new(folder.path());
    let fresh = ["--memory", "64MiB"];
    let mut serving = [0, 1, 2].map(|number| nodes.start(number, &nodes.anywhere(number), &fresh));
    let urls = [0, 1, 2].map(|number| nodes.listening(number));
    let pool = |carrier: usize| {
        let urls: Vec<&str> = urls.iter().map(|of_node| &of_node[carrier][..]).collect();
        connect(&urls.join(",")).expect("the nodes serve")
    };
    pool(0).create_store(&NewStore::prism_kv("s", 48 << 20)).expect("the nodes have memory");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for carrier in 0..urls[0].len() {
            let (pool, is_over) = (pool(carrier), &is_over);
            scope.spawn(move || {
                let client = pool.open("s").expect("a store");
                let items = (0..64).map(|n| (format!("{carrier} {n}"), 0, 0)).collect();
                let mut registers = Registers { client: &client, items };
                let mut value = 0;
                let mut write_and_read = || {
                    value += 1;
                    registers.write_and_read(value)
                };
                while !is_over.load(Ordering::Relaxed) {
                    write_and_read();
                }
                until("all operations succeed again", write_and_read);
            });
        }
        for round in 0..40 {
            let number = round % serving.len();
            std::thread::sleep(Duration::from_millis(250));
            serving[number].kill();
            std::thread::sleep(Duration::from_millis(if round % 4 == 3 { 1000 } else { 20 }));
            serving[number] = nodes.start(number, &urls[number], &[]);
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

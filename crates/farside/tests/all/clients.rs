//! Guarantees of the library's clients over every fabric.
//!
//! Invariant: every wait has a deadline, so that a test fails rather than hangs.

use crate::support::{Node, PATIENCE, Process, serve, until};
use farside::local::Client;
use farside::{Error, KvError, NewStore, Pool, Ran, connect};
use farside_remote::FabricError;
use std::sync::mpsc;

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

//! Sessions that use keys they were never given: the node reveals nothing, counts the keys, and closes the session.

use crate::support::{Node, farside, until};
use farside_fabrics::executor::block_on;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::service::address;
use farside_remote::{Addr, ChainBuf, Fabric, FabricError, Key, NodeId, Reply, Status, read};
use farside_systems::kv::pilaf::layout::{Op, Request};
use std::rc::Rc;

const NODE: NodeId = NodeId(0);

/// Returns the url of a node's engine, from the next line of the node's output.
fn at(node: &Node) -> String {
    let line = node.process.line();
    line.split_once(" at ").unwrap_or_else(|| panic!("no url in '{line}'")).1.to_owned()
}

fn open_store(endpoint: &Rc<farside::parts::Endpoint>) -> Store {
    let request = serde_json::to_vec(&Ask::OpenStore { name: "default".into() }).expect("plain data");
    let mut answer = Vec::new();
    block_on(endpoint, endpoint.call(NODE, ServiceId::NODE, &request, &mut answer)).expect("an answer");
    match serde_json::from_slice(&answer) {
        Ok(Answer::Store(store)) => store,
        other => panic!("{other:?} is not a store"),
    }
}

/// Reads the first eight bytes of the store's table with a key. Returns the status and these bytes, 0 if none were
/// read.
fn read_by(
    endpoint: &Rc<farside::parts::Endpoint>,
    store: &Store,
    key: Key,
) -> Result<(Status, u64), FabricError> {
    let mut buffer = ChainBuf::new();
    let mut chain = buffer.begin(key);
    let bytes = chain.also(read(Addr::new(store.table_at), 8));
    let mut reply = Reply::new();
    block_on(endpoint, endpoint.run(NODE, &chain, &mut reply))?;
    let read = reply.get(bytes).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    Ok((reply.status(bytes), read))
}

#[test]
fn a_session_that_guesses_keys_is_counted_and_ends() {
    for scheme in ["tcp", "udp"] {
        let listen = format!("{scheme}://127.0.0.1:0");
        let node =
            Node::with(&["--memory", "16MiB", "--store", "default", "--quota", "4MiB", "--listen", &listen]);
        let url = at(&node);
        farside(["kv", "put", "k", "v", "--pool", &url]).done();
        let pool = farside::connect(&url).expect("the node serves");
        let [good, bad] = [(); 2].map(|()| Rc::new(pool.endpoint_here().expect("a session")));
        let (theirs, store) = (open_store(&good), open_store(&bad));
        let key = store.extent().key;
        assert_eq!(read_by(&bad, &store, key).expect("the process runs").0, Status::Ok);
        // Another session's key, near misses, and keys of other regions all open nothing.
        let near = (0..64).map(|bit| Key::new(key.region(), key.secret() ^ 1 << bit));
        let others = [theirs.extent().key, Key::new(0, key.secret()), Key::new(u32::MAX, key.secret())];
        let mut refused = 0;
        let ended = others.into_iter().chain(near).find_map(|wrong| match read_by(&bad, &store, wrong) {
            Ok(read) => {
                assert_eq!(read, (Status::Access, 0), "{wrong:?}");
                refused += 1;
                None
            }
            Err(error) => Some(error),
        });
        // The response to the last of them may be lost with the session.
        assert!((15..=16).contains(&refused), "{refused} refusals");
        let ended = ended.expect("a session cannot guess forever").to_string();
        assert!(ended.contains("the session with node 0 is closed"), "{ended}");
        assert_eq!(
            read_by(&good, &theirs, theirs.extent().key).expect("other sessions continue").0,
            Status::Ok
        );
        let wrong_keys = || node.run(["info", "--json"]).done().json()["refusals"]["wrong_keys"].clone();
        until("the wrong keys are counted", || wrong_keys() == 16);
        assert_eq!(node.process.log().matches("never given").count(), 1, "{}", node.process.log());
        drop((good, bad));
        until("no session is left", || node.sessions() == 0);
    }
}

#[test]
fn a_session_that_guesses_keys_in_calls_ends_too() {
    let node = Node::with(&["--memory", "16MiB", "--listen", "tcp://127.0.0.1:0"]);
    let pool = farside::connect(&at(&node)).expect("the node serves");
    let pilaf = farside::NewStore { kind: "pilaf".into(), ..farside::NewStore::prism_kv("default", 4 << 20) };
    pool.create_store(&pilaf).expect("the node has memory");
    let endpoint = Rc::new(pool.endpoint_here().expect("a session"));
    let key = open_store(&endpoint).extent().key;
    let get_by = |key: Key| {
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        let service = address(key, &mut request);
        Request { op: Op::Get, key: b"k", value: b"" }.encode(&mut request);
        block_on(&endpoint, endpoint.call(NODE, service, &request, &mut answer))
    };
    get_by(key).expect("its own key");
    let ended = (0..64).find_map(|bit| match get_by(Key::new(key.region(), key.secret() ^ 1 << bit)) {
        Err(FabricError::Refused(reason)) => {
            assert!(reason.contains("for the key of this call"), "{reason}");
            None
        }
        ended => Some(ended),
    });
    let ended =
        ended.expect("a session cannot guess forever").expect_err("a wrong key opens nothing").to_string();
    assert!(ended.contains("the session with node 0 is closed"), "{ended}");
    let wrong_keys = || node.run(["info", "--json"]).done().json()["refusals"]["wrong_keys"].clone();
    until("the wrong keys are counted", || wrong_keys() == 16);
}

#[test]
fn keys_of_a_dropped_store_are_not_guesses() {
    let node = Node::with(&[
        "--memory",
        "16MiB",
        "--store",
        "default",
        "--quota",
        "4MiB",
        "--listen",
        "tcp://127.0.0.1:0",
    ]);
    let pool = farside::connect(&at(&node)).expect("the node serves");
    let endpoint = Rc::new(pool.endpoint_here().expect("a session"));
    let before = open_store(&endpoint);
    pool.drop_store("default").expect("the store exists");
    let old = before.extent().key;
    for _ in 0..20 {
        assert_eq!(read_by(&endpoint, &before, old).expect("the session continues").0, Status::Access);
    }
    pool.create_store(&farside::NewStore::prism_kv("default", 4 << 20)).expect("the node has memory");
    let after = open_store(&endpoint);
    for _ in 0..20 {
        assert_eq!(read_by(&endpoint, &before, old).expect("the session continues").0, Status::Access);
        assert_eq!(
            read_by(&endpoint, &after, after.extent().key).expect("the session continues").0,
            Status::Ok
        );
    }
    assert_eq!(node.run(["info", "--json"]).done().json()["refusals"]["wrong_keys"], 0);
}

//! Tests of latched objects on a real fabric: results, costs and errors of each scheme.

use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::Count;
use farside_remote::fabric::Ran;
use farside_remote::{Addr, Capabilities, ChainBuf, Fabric, NodeId, Reply, write};
use farside_systems::latch::scheme::Steps;
use farside_systems::latch::system::LatchKind;
use farside_systems::latch::{KIND, LatchError, Latched, Placement, Scheme, Spec, held};
use farside_systems::store;
use std::rc::Rc;

const NODE: NodeId = NodeId(0);
const OBJECTS: u64 = 5;
const LEN: usize = 200;

type Endpoint = Rc<Count<Direct>>;

struct Client {
    endpoint: Endpoint,
    latched: Latched<Endpoint>,
}

impl Client {
    fn open(home: &Home) -> Client {
        let endpoint = home.endpoint();
        let opening = store::open::<LatchKind, _>(Rc::clone(&endpoint), NODE, "s");
        let latched = run(&endpoint, opening).expect("the store exists");
        endpoint.take();
        Client { endpoint, latched }
    }

    /// Adds one to each byte of an object. Returns the first byte as it was before.
    fn add(&mut self, object: u64) -> Result<u8, LatchError> {
        let body = async |content: &mut [u8]| {
            let before = content[0];
            assert!(content.iter().all(|&byte| byte == before), "torn: {content:?}");
            content.fill(before.wrapping_add(1));
            before
        };
        run(&self.endpoint, self.latched.with_exclusive(object, body))
    }

    fn read(&mut self, object: u64) -> Result<u8, LatchError> {
        let mut content = [0; LEN];
        run(&self.endpoint, self.latched.read(object, &mut content))?;
        assert!(content.iter().all(|&byte| byte == content[0]), "torn: {content:?}");
        Ok(content[0])
    }

    fn read_shared(&mut self, object: u64) -> Result<u8, LatchError> {
        run(&self.endpoint, self.latched.with_shared(object, async |content| content[0]))
    }
}

/// Schemes that software fabrics can carry.
fn schemes() -> impl Iterator<Item = Scheme> {
    let all = Scheme::ALL.into_iter().map(|(_, scheme)| scheme);
    all.filter(|scheme| Capabilities::SOFTWARE.contains(scheme.needs()))
}

/// Parameters of a store of two objects with their latches.
fn spec_of(scheme: Scheme) -> Spec {
    let placement = Placement::Inline;
    Spec { objects: 2, len: LEN as u32, scheme, placement, relaxed: false, lease: None }
}

/// Calls `test` with a node and a store for each scheme and placement.
fn with_each(test: impl Fn(&Home, &Spec)) {
    let specs = schemes().flat_map(|scheme| {
        Placement::ALL.map(|placement| Spec {
            objects: OBJECTS,
            len: LEN as u32,
            scheme,
            placement,
            relaxed: false,
            lease: None,
        })
    });
    let home = Home::new(32);
    let mut count = 0;
    for spec in specs {
        let parameters = serde_json::to_string(&spec).expect("plain data");
        let is_possible = spec.placement != Placement::Separate
            || !spec.scheme.is_optimistic() && spec.scheme.steps != Steps::Unlatch;
        let ask = farside_remote::control::Ask::CreateStore {
            name: "s".into(),
            kind: KIND.into(),
            parameters,
            quota: 2 << 20,
        };
        let created = home.host.ask(ask, std::time::Duration::from_secs(60));
        assert_eq!(created.is_ok(), is_possible, "{spec:?}: {created:?}");
        if is_possible {
            test(&home, &spec);
            home.ask(farside_remote::control::Ask::DropStore { name: "s".into() });
            count += 1;
        }
    }
    assert_eq!(count, 2 * 13 + 8, "13 schemes, of which 8 can have separate latches");
}

#[test]
fn each_scheme_keeps_what_was_written_and_leaves_no_latch() {
    with_each(|home, spec| {
        let (mut client, mut other) = (Client::open(home), Client::open(home));
        for turn in 0..6 {
            for object in 0..OBJECTS {
                let client = if turn % 2 == 0 { &mut client } else { &mut other };
                assert_eq!(client.add(object), Ok(turn), "{spec:?}");
                assert_eq!((client.read(object), client.read_shared(object)), (Ok(turn + 1), Ok(turn + 1)));
            }
        }
        for client in [&mut client, &mut other] {
            assert_eq!(run(&client.endpoint, client.latched.settle()), Ok(()));
            assert_eq!(client.latched.retries(), 0, "{spec:?}");
        }
        let endpoint = home.endpoint();
        let found = run(&endpoint, store::fetch(&endpoint, NODE, "s")).expect("the store exists");
        let memory = home.host.memory();
        let load = |at| {
            let Ok(word) = farside_remote::Memory::load(memory, at, farside_remote::Width::W8);
            word as u64
        };
        assert_eq!(held(&found, load), Ok(Vec::new()), "{spec:?}");
    });
}

#[test]
fn each_scheme_sends_the_requests_of_its_steps() {
    with_each(|home, spec| {
        let mut client = Client::open(home);
        assert_eq!(client.add(0), Ok(0));
        client.endpoint.take();
        let mut costs = |operation: fn(&mut Client) -> Result<u8, LatchError>| {
            operation(&mut client).expect("nobody holds the latch");
            let costs = client.endpoint.take();
            (costs.requests, costs.atomics)
        };
        let exclusive = match spec.scheme.steps {
            Steps::Basic => (4, 2),
            Steps::Speculative => (3, 2),
            Steps::Overlapped | Steps::Async => (2, 2),
            Steps::Unlatch => (2, 1),
        };
        assert_eq!(costs(|client| client.add(0)), exclusive, "{spec:?}");
        let shared = if spec.scheme.steps == Steps::Basic { (3, 2) } else { (2, 2) };
        assert_eq!(costs(|client| client.read_shared(0)), shared, "{spec:?}");
        let reads = match spec.scheme.name() {
            "v2" | "v2-footer" => (3, 0),
            _ if spec.scheme.is_optimistic() => (2, 0),
            _ => shared,
        };
        assert_eq!(costs(|client| client.read(0)), reads, "{spec:?}");
    });
}

#[test]
fn a_latch_that_stays_held_makes_its_object_busy_and_no_other() {
    let home = Home::new(32);
    for name in ["basic", "async-rw", "unlatch", "v2", "crc", "crc-footer"] {
        let scheme = Scheme::named(name).expect("a scheme");
        let spec = spec_of(scheme);
        let parameters = serde_json::to_string(&spec).expect("plain data");
        home.create_of(KIND, "s", 2, &parameters);
        let mut client = Client::open(&home);
        assert_eq!(client.add(0), Ok(0), "{name}");
        let endpoint = Rc::clone(&client.endpoint);
        let found = run(&endpoint, store::fetch(&endpoint, NODE, "s")).expect("the store exists");
        // Object 0 has its latch in one of these words; the test holds it as a dead client does.
        let latch = match scheme.steps {
            Steps::Unlatch if name == "unlatch" => LEN as u64,
            Steps::Unlatch => 256 - 8,
            _ if scheme.is_optimistic() => 8,
            _ => 0,
        };
        let word = if scheme.has_shared_mode() { 1u64 << 60 } else { 1 };
        let (mut buffer, mut reply, bytes) = (ChainBuf::new(), Reply::new(), word.to_le_bytes());
        let mut chain = buffer.begin(found.extent().key);
        chain.also(write(Addr::new(found.table_at + latch), &bytes));
        run(&endpoint, endpoint.run(NODE, &chain, &mut reply)).expect("the node responds");
        let busy = client.add(0).expect_err("the latch is held");
        assert_eq!((&busy, busy.ran()), (&LatchError::Busy, Ran::No), "{name}");
        assert_eq!((client.read(0), client.read_shared(0)), (Err(LatchError::Busy), Err(LatchError::Busy)));
        assert_eq!((client.add(1), client.read(1)), (Ok(0), Ok(1)), "{name}");
        home.ask(farside_remote::control::Ask::DropStore { name: "s".into() });
    }
}

#[test]
fn a_scheme_that_needs_whole_lines_is_refused_where_lines_are_not_whole() {
    let home = Home::new(32);
    for (name, instead) in [("versions", "crc"), ("versions-footer", "crc-footer")] {
        let scheme = Scheme::named(name).expect("a scheme");
        let spec = spec_of(scheme);
        home.create_of(KIND, "s", 2, &serde_json::to_string(&spec).expect("plain data"));
        let endpoint = home.endpoint();
        let opening = store::open::<LatchKind, _>(Rc::clone(&endpoint), NODE, "s");
        let refused = run(&endpoint, opening).err().expect("lines are copied in parts").to_string();
        assert_eq!(
            refused,
            format!(
                "the scheme {name} of store 's' needs a fabric with whole cache lines, and the one to node 0 has \
                 only: calls, conditional ops, masked CAS; nothing was changed: reach the node by another fabric, or \
                 create the store with the scheme {instead}"
            )
        );
        home.ask(farside_remote::control::Ask::DropStore { name: "s".into() });
    }
}

#[test]
fn wrong_numbers_and_lengths_are_refused_with_the_right_ones() {
    let home = Home::new(32);
    home.create_of(KIND, "s", 2, r#"{"objects": 3, "len": 200, "scheme": "v2"}"#);
    let mut client = Client::open(&home);
    assert_eq!(client.add(3), Err(LatchError::NoSuchObject { object: 3, objects: 3 }));
    assert_eq!(client.read(3), Err(LatchError::NoSuchObject { object: 3, objects: 3 }));
    let short = run(&client.endpoint, client.latched.read(0, &mut [0; 8]));
    assert_eq!(short, Err(LatchError::Length(200)));
    assert_eq!(client.endpoint.take().requests, 0);
    for parameters in [
        "{}",
        r#"{"objects": 0, "len": 200, "scheme": "v2"}"#,
        r#"{"objects": 1, "len": 201, "scheme": "v2"}"#,
        r#"{"objects": 1, "len": 65536, "scheme": "v2"}"#,
        r#"{"objects": 1, "len": 200, "scheme": "v3"}"#,
        r#"{"objects": 1, "len": 200, "scheme": "v2", "placement": "separate"}"#,
        r#"{"objects": 4294967296, "len": 32768, "scheme": "v2"}"#,
    ] {
        let ask = farside_remote::control::Ask::CreateStore {
            name: "t".into(),
            kind: KIND.into(),
            parameters: parameters.into(),
            quota: 2 << 20,
        };
        let refused = home.host.ask(ask, std::time::Duration::from_secs(60)).expect_err(parameters);
        println!("{refused}");
    }
}

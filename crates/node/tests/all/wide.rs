//! Only clients whose chains an engine runs can open wide stores.

use crate::support::Slots;
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::shm;
use farside_fabrics::tcp::TcpLine;
use farside_node::host::{Host, Listen, Options};
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, FabricError, NodeId};
use std::sync::Arc;

const NODE: NodeId = NodeId(0);

fn ask<F: Fabric + Turns>(endpoint: &F, ask: &Ask) -> Result<Answer, FabricError> {
    let request = serde_json::to_vec(ask).expect("plain data");
    let mut answer = Vec::new();
    block_on(endpoint, endpoint.call(NODE, ServiceId::NODE, &request, &mut answer))?;
    Ok(serde_json::from_slice(&answer).expect("an answer"))
}

fn create(name: &str, parameters: &str) -> Ask {
    let (kind, parameters) = ("slots".into(), parameters.into());
    Ask::CreateStore { name: name.into(), kind, parameters, quota: 2 << 20 }
}

fn open(name: &str) -> Ask {
    Ask::OpenStore { name: name.into() }
}

#[test]
fn a_wide_store_is_opened_only_over_engines() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let memory = Mapping::create(32 << 20, Pages::Small).expect("memory");
    let options = Options {
        socket: Some(socket.clone()),
        listen: vec![Listen::Tcp(([127, 0, 0, 1], 0).into())],
        ..Options::default()
    };
    let host = Arc::new(Host::start(memory, vec![Box::new(Slots::default())], options).expect("it serves"));
    let Listen::Tcp(address) = host.listening()[0] else { panic!("it listens by tcp") };
    let by_engine = TcpLine::connect(address).expect("it listens");
    let by_engine = Endpoint::open(by_engine, NODE, Config { incarnation: 1, ..Config::default() });
    let by_engine = by_engine.expect("a session");
    let node: Arc<dyn LocalNode> = Arc::clone(&host) as _;
    let direct =
        [local::connect(&node, NODE).expect("a session"), shm::connect(&socket, NODE).expect("a session")];
    for (endpoint, name) in direct.iter().zip(["a", "b"]) {
        assert!(matches!(ask(endpoint, &create(name, "32")), Ok(Answer::Store(Store { wide: false, .. }))));
        assert!(matches!(ask(endpoint, &open(name)), Ok(Answer::Store(Store { secret: 1.., .. }))));
        // A client that may not open a wide store may still create one. The response is the store's entry without the
        // key.
        let wide = format!("wide-{name}");
        let Ok(Answer::Store(made)) = ask(endpoint, &create(&wide, "+32")) else {
            panic!("it was not created")
        };
        assert!(made.wide && made.secret == 0, "{made:?}");
        let refused = ask(endpoint, &open(&wide)).expect_err("its chains would take no locks").to_string();
        assert!(refused.contains("open it over ring, udp or tcp"), "{refused}");
        let Ok(Answer::Store(opened)) = ask(&by_engine, &open(&wide)) else {
            panic!("engines take the locks")
        };
        assert!(opened.wide && opened.secret != 0, "{opened:?}");
    }
}

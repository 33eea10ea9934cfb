//! The order in which a client that runs its own chains publishes its turn and reads whether it is fenced.

use crate::support::observed::{Made, Observed, Observer};
use farside_fabrics::executor::block_on;
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::shm;
use farside_node::host::{Host, Options};
use farside_remote::arena::session::fenced_at;
use farside_remote::control::{Answer, Ask};
use farside_remote::{ChainBuf, Fabric, FabricError, NodeId, Reply, read};
use farside_systems::identity::{Identity, bind};
use farside_systems::kv::prism_kv::KIND;
use farside_systems::kv::prism_kv::service::PrismKvKind;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const NONCE: u64 = 7;

/// Fences the client at the moment at which the client reads whether it is fenced.
struct Fencer {
    host: Arc<Host>,
    ask: Ask,
    /// Slot of the client to fence, once it is to be fenced.
    slot: Rc<Cell<Option<u32>>>,
    fenced: Rc<Cell<Option<Result<Answer, FabricError>>>>,
}

impl Observer for Fencer {
    fn before(&self, _: &Mapping, at: u64, made: &Made<'_>) {
        if matches!(made, Made::Read) && self.slot.get().is_some_and(|slot| fenced_at(slot) == at) {
            self.slot.take();
            self.fenced.set(Some(self.host.ask(self.ask.clone(), Duration::from_millis(300))));
        }
    }
}

#[test]
fn a_client_that_is_fenced_while_it_begins_a_turn_runs_no_chain_after_the_fence() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node");
    let memory = Mapping::create(32 << 20, Pages::Small).expect("memory");
    let options = Options { socket: Some(socket.clone()), ..Options::default() };
    let host = Arc::new(Host::start(memory, vec![Box::new(PrismKvKind)], options).expect("a node"));
    let parameters = r#"{"items": 100}"#.into();
    let create = Ask::CreateStore { name: "s".into(), kind: KIND.into(), parameters, quota: 8 << 20 };
    let Ok(Answer::Store(store)) = host.ask(create, Duration::from_secs(10)) else { panic!("a store") };
    let (slot, fenced) = (Rc::<Cell<_>>::default(), Rc::<Cell<_>>::default());
    let fencer = Fencer {
        host: Arc::clone(&host),
        ask: Ask::Fence { name: "s".into(), id: store.id, nonce: NONCE },
        slot: Rc::clone(&slot),
        fenced: Rc::clone(&fenced),
    };
    let endpoint = shm::connect_on(&socket, NodeId(0), |mapping| Observed { mapping, observer: fencer });
    let endpoint = endpoint.expect("a connection");
    let identity = Identity { client: 1, nonce: NONCE };
    block_on(&endpoint, bind(&endpoint, NodeId(0), &store, identity)).expect("nobody has fenced it");
    slot.set(Some(endpoint.session().slot));
    let run = || {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(store.extent().key);
        chain.also(read(farside_remote::Addr::new(store.table_at), 8));
        block_on(&endpoint, endpoint.run(NodeId(0), &chain, &mut reply))
    };
    let ran = run();
    let fenced = fenced.take().expect("the client reads whether it is fenced");
    assert!(fenced.is_err() || ran.is_err(), "a chain ran after its client was fenced");
    assert!(ran.as_ref().err().is_none_or(FabricError::is_fenced), "{fenced:?} {ran:?}");
    let later = run().expect_err("it is fenced");
    assert!(later.is_fenced(), "{later}");
}

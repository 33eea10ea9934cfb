//! PRISM-KV when its session ends in the middle of an operation: what the error says of the operation is true.

use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::timer;
use farside_node::host::{Host, Options};
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_systems::kv::Kv;
use farside_systems::kv::prism_kv::layout::PART_MAX;
use farside_systems::kv::prism_kv::service::PrismKvKind;
use farside_systems::kv::prism_kv::{KIND, PrismKv};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const NODE: NodeId = NodeId(0);

/// A fabric that loses the answer to one chain, which may have run.
struct Losing {
    inner: Direct,
    /// Chains until then, and what is said of it.
    lost: Cell<Option<(u32, Ran)>>,
}

impl Fabric for Losing {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let lost = self.lost.get();
        self.lost.set(lost.and_then(|(chains, ran)| Some((chains.checked_sub(1)?, ran))));
        match lost {
            Some((0, ran)) => {
                if ran == Ran::Yes {
                    self.inner.run(node, chain, reply).await?;
                }
                Err(FabricError::Lost { node, ran, reason: "its answer was lost".into() })
            }
            _ => self.inner.run(node, chain, reply).await,
        }
    }

    fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> impl Future<Output = Result<(), FabricError>> {
        self.inner.call(node, service, request, answer)
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }
}

impl Clock for Losing {
    fn now(&self) -> Duration {
        timer::now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        timer::sleep(duration)
    }
}

fn node() -> Arc<Host> {
    let memory = Mapping::create(64 << 20, Pages::Small).expect("memory");
    let host = Host::start(memory, vec![Box::new(PrismKvKind)], Options::default()).expect("a node");
    let ask = Ask::CreateStore {
        name: "s".into(),
        kind: KIND.into(),
        parameters: r#"{"items": 1000}"#.into(),
        quota: 32 << 20,
    };
    host.ask(ask, Duration::from_secs(60)).expect("room");
    Arc::new(host)
}

fn client(host: &Arc<Host>) -> (PrismKv<Rc<Losing>>, Rc<Losing>) {
    let node: Arc<dyn LocalNode> = Arc::clone(host) as _;
    let fabric = Rc::new(Losing { inner: local::connect(&node).expect("a session"), lost: Cell::new(None) });
    let kv =
        block_on(&fabric.inner, PrismKv::open(Rc::clone(&fabric), NODE, "s")).expect("the store is there");
    (kv, fabric)
}

#[test]
fn what_an_error_says_of_an_operation_is_true_whichever_answer_is_lost() {
    let host = node();
    let (mut kv, fabric) = client(&host);
    let (mut reader, at) = client(&host);
    let mut said = [0; 3];
    // The probe, then the install; with a slot that is known, the install alone.
    for cached in [false, true] {
        kv = kv.with_slot_cache(if cached { 16 } else { 0 });
        for ran in [Ran::Yes, Ran::No, Ran::Unknown] {
            for chains in 0..2 {
                block_on(&fabric.inner, kv.put(b"k", b"old")).expect("stored");
                fabric.lost.set(Some((chains, ran)));
                let put = block_on(&fabric.inner, kv.put(b"k", b"new"));
                fabric.lost.set(None);
                let stored =
                    block_on(&at.inner, reader.get(b"k")).expect("read").expect("there").value == b"new";
                match put.map_err(|error| error.ran()) {
                    Ok(()) => assert!(stored && cached, "it has one chain, and its answer was not lost"),
                    Err(Ran::Yes) => assert!(stored),
                    Err(Ran::No) => assert!(!stored),
                    Err(Ran::Unknown) => {
                        assert!(chains == 1 || cached, "a probe stores nothing, and that is known")
                    }
                }
                said[ran as usize] += 1;
                fabric.lost.set(Some((0, ran)));
                let got = block_on(&fabric.inner, kv.get(b"k")).map(drop);
                assert_eq!(got.expect_err("its answer was lost").ran(), Ran::No, "a get changes nothing");
            }
        }
    }
    assert_eq!(said, [4; 3]);
}

#[test]
fn parts_of_a_value_that_may_have_been_stored_are_not_given_back() {
    let host = node();
    let (mut kv, fabric) = client(&host);
    let value: Vec<u8> = (0..3 * PART_MAX).map(|n| (n / 7) as u8).collect();
    // A part a chain, then the probe, then the head, whose answer is lost.
    fabric.lost.set(Some((4, Ran::Yes)));
    let put = block_on(&fabric.inner, kv.put(b"k", &value));
    assert_eq!(put.expect_err("its answer was lost").ran(), Ran::Unknown);
    drop((kv, fabric));
    let (mut reader, at) = client(&host);
    // Whoever is given buffers now must not be given those.
    for n in 0..64u32 {
        block_on(&at.inner, reader.put(&n.to_be_bytes(), &vec![n as u8; PART_MAX - 100])).expect("stored");
        block_on(&at.inner, reader.delete(&n.to_be_bytes())).expect("deleted");
    }
    let item = block_on(&at.inner, reader.get(b"k")).expect("read").expect("it was stored");
    assert!(item.value == value, "the parts are its own");
    let scan = host.ask(Ask::Scan { name: "s".into() }, Duration::from_secs(60));
    assert_eq!(scan, Ok(Answer::Done));
}

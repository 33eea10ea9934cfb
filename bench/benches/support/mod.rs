//! A filled PRISM-KV store on a node in this process, and the median of measurements.

#![allow(dead_code, reason = "each benchmark uses a part of this")]

use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::shm;
use farside_node::host::{Host, Options};
use farside_remote::NodeId;
use farside_remote::control::Ask;
use farside_systems::kv::Kv;
use farside_systems::kv::prism_kv::layout::Table;
use farside_systems::kv::prism_kv::service::PrismKvKind;
use farside_systems::kv::prism_kv::{KIND, PrismKv};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const NAME: &str = "bench";

/// A filled store. Its keys are the numbers below the number of records, big-endian, and each key has its own slot.
pub(crate) struct Store {
    pub(crate) host: Arc<Host>,
    socket: PathBuf,
    pub(crate) table: Table,
}

pub(crate) type Client = PrismKv<Rc<Direct>>;

impl Store {
    /// Creates a store of up to `quota` bytes with `records` values of `value_size` bytes, put in an order that does
    /// not depend on their keys.
    pub(crate) fn fill(records: u64, value_size: usize, quota: u64) -> Store {
        let memory = Mapping::create(quota + (16 << 20), Pages::Auto).expect("memory for the node");
        let socket = std::env::temp_dir().join(format!("farside-bench-{}.sock", std::process::id()));
        let options = Options { socket: Some(socket.clone()), ..Options::default() };
        let host = Host::start(memory, vec![Box::new(PrismKvKind)], options).expect("a node");
        let host = Arc::new(host);
        let parameters = format!(r#"{{"items": {records}, "placement": "permuted"}}"#);
        let (name, kind) = (NAME.to_owned(), KIND.to_owned());
        host.ask(Ask::CreateStore { name, kind, parameters, quota }, Duration::from_secs(60))
            .expect("memory for the store");

        let endpoint = endpoint_of(&host);
        let mut client = open(&endpoint);
        let mut value = vec![0; value_size];
        block_on(&*endpoint, async {
            for number in shuffled(records) {
                value_of(number, &mut value);
                client.put(&number.to_be_bytes(), &value).await.expect("memory for every record");
            }
        });
        let table = client.table().clone();
        Store { host, socket, table }
    }

    pub(crate) fn memory(&self) -> &Mapping {
        self.host.memory()
    }

    /// Creates an endpoint for this thread over `local`, on the node's own mapping.
    pub(crate) fn endpoint(&self) -> Rc<Direct> {
        endpoint_of(&self.host)
    }

    /// Creates an endpoint for this thread over `shm`, as another process would: through the node's socket, on a
    /// separate mapping.
    pub(crate) fn shm_endpoint(&self) -> Rc<Direct> {
        Rc::new(shm::connect(&self.socket, NodeId(0)).expect("the node serves there"))
    }
}

fn endpoint_of(host: &Arc<Host>) -> Rc<Direct> {
    let node: Arc<dyn LocalNode> = Arc::clone(host) as _;
    Rc::new(local::connect(&node, NodeId(0)).expect("a session"))
}

/// Opens a client of the store over `endpoint`.
pub(crate) fn open(endpoint: &Rc<Direct>) -> Client {
    block_on(&**endpoint, PrismKv::open(Rc::clone(endpoint), NodeId(0), NAME)).expect("the store exists")
}

/// Fills the value of key `number`. Each byte depends on the key and on the byte's index.
fn value_of(number: u64, value: &mut [u8]) {
    for (index, byte) in value.iter_mut().enumerate() {
        *byte = value_byte(number, index);
    }
}

/// Returns byte `index` of the value of key `number`.
#[inline]
pub(crate) fn value_byte(number: u64, index: usize) -> u8 {
    (number as u8).wrapping_add(index as u8)
}

/// Returns the numbers below `count` in a fixed pseudo-random order.
fn shuffled(count: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..numbers.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        numbers.swap(last, ((u128::from(random) * (last as u128 + 1)) >> 64) as usize);
    }
    numbers
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

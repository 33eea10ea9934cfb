//! A store without contents, whose nodes answer requests by as many bytes as they ask for. With it, the calls of
//! [`fasst`](super::fasst) are measured alone.
//!
//! No paper describes this system. Its request is the one with which FaSST measures its calls (OSDI'16, section 4.5).
//!
//! ```text
//! request  | number u32 | length of the response u32 | filler |
//! response | number u32 | filler: the last byte of the number |
//! ```

use super::fasst::{
    Batch, Destination, ENTRIES_MAX, HEADER_SIZE, Handled, Handler, Handlers, Header, PACKET_MAX, REFUSED,
    entry_size,
};
use crate::members;
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::service::{Call, Context, Extent, Kind, Locks, Plan, Service, Work};
use farside_remote::{Capabilities, Fabric, FabricError, Memory, NodeId};
use std::fmt;
use std::rc::Rc;

/// Kind of the store in the catalog.
pub const KIND: &str = "rpc-echo";
/// Length of the shortest request and of the shortest response in bytes.
pub const LEN_MIN: usize = 8;
/// Length of the longest request and of the longest response in bytes. In the paper, that is an MTU without headers.
pub const LEN_MAX: usize = 4032;

/// Type of the only request.
const ECHO: u8 = 1;
/// Status of its response.
const DONE: u8 = 1;
/// Size of the table in bytes. Nothing lies in it.
const TABLE_LEN: u64 = 64;

/// Client of a store, for one task.
pub struct Echo<F> {
    fabric: F,
    members: Rc<[Destination]>,
    batch: Batch,
    /// The numbers of the requests in the batch, and the members that they go to.
    asked: Vec<(u32, NodeId)>,
    number: u32,
}

/// Requests that are sent at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asking {
    /// Number of requests, 1 to [`Asking::requests_max`].
    pub requests: usize,
    /// Length of a request in bytes, [`LEN_MIN`] to [`LEN_MAX`].
    pub request_len: usize,
    /// Length of a response in bytes, [`LEN_MIN`] to [`LEN_MAX`].
    pub response_len: usize,
}

impl Asking {
    /// Largest number of requests of these lengths that fit into one packet, and their responses into another.
    pub fn requests_max(request_len: usize, response_len: usize) -> usize {
        let longest = entry_size(request_len.max(response_len));
        ((PACKET_MAX - HEADER_SIZE) / longest).min(ENTRIES_MAX)
    }
}

/// Error of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EchoError {
    /// The node returned no response.
    Fabric(FabricError),
    /// The node has refused the request, for this reason.
    Refused(String),
    /// The response of the node is not that of the request.
    Wrong(NodeId),
    /// The requests or their responses do not fit into a packet.
    TooLong,
}

impl<F: Fabric + Clock> Echo<F> {
    /// Opens the store called `name` in a pool of `nodes` nodes.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub async fn open_in(fabric: F, nodes: u32, name: &str) -> Result<Echo<F>, StoreError> {
        let members = members::open(&fabric, nodes, name).await?;
        EchoKind::open(fabric, &members, &Options::NONE).await
    }
}

impl<F: Fabric> Echo<F> {
    /// Returns a client for another task, which has this number.
    pub fn another(&self, task: u16) -> Echo<F>
    where
        F: Clone,
    {
        Echo {
            fabric: self.fabric.clone(),
            members: Rc::clone(&self.members),
            batch: Batch::new(1, task),
            asked: Vec::new(),
            number: 0,
        }
    }

    /// Sends a batch of requests, and checks their responses. `draw` chooses a member for each request: its number is
    /// the drawn one, modulo the number of members.
    ///
    /// # Errors
    /// [`EchoError`], of the first request that has one.
    pub async fn ask(&mut self, asking: Asking, mut draw: impl FnMut() -> u64) -> Result<(), EchoError> {
        let Asking { requests, request_len, response_len } = asking;
        self.batch.clear(0);
        self.asked.clear();
        for _ in 0..requests {
            let to = self.members[(draw() % self.members.len() as u64) as usize];
            self.number = self.number.wrapping_add(1);
            let number = self.number;
            let pushed = self.batch.push(to, ECHO, response_len, |out| {
                let end = out.len() + request_len;
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(&(response_len as u32).to_le_bytes());
                out.resize(end, 0);
            });
            pushed.ok_or(EchoError::TooLong)?;
            self.asked.push((number, to.node));
        }
        self.batch.send(&self.fabric).await;
        for (place, (number, node)) in self.asked.iter().enumerate() {
            let response = self.batch.response(place).map_err(|error| EchoError::Fabric(error.clone()))?;
            if response.status == REFUSED {
                return Err(EchoError::Refused(String::from_utf8_lossy(response.payload).into_owned()));
            }
            let [first @ .., last] = response.payload else { return Err(EchoError::Wrong(*node)) };
            let is_right = response.status == DONE
                && response.payload.len() == response_len
                && first.starts_with(&number.to_le_bytes())
                && *last == filler(*number);
            if !is_right {
                return Err(EchoError::Wrong(*node));
            }
        }
        Ok(())
    }
}

impl fmt::Display for EchoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EchoError::Fabric(error) => error.fmt(f),
            EchoError::Refused(reason) => f.write_str(reason),
            EchoError::Wrong(node) => write!(f, "node {} has answered another request", node.0),
            EchoError::TooLong => {
                f.write_str("the requests do not fit into one packet: send fewer or shorter ones")
            }
        }
    }
}

impl std::error::Error for EchoError {}

/// Filler of the response to the request with this number.
fn filler(number: u32) -> u8 {
    number.to_le_bytes()[0]
}

/// Node-side half of the store.
pub struct EchoKind;

impl<M: Memory> Kind<M> for EchoKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn is_table_only(&self) -> bool {
        true
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        match parameters {
            "{}" => Ok(Plan { table_len: TABLE_LEN, parameters: parameters.into(), wide: false }),
            _ => Err(format!("a {KIND} store takes no parameters: give {{}}")),
        }
    }

    fn serve(&self, _parameters: &str, _table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(EchoService))
    }
}

impl System for EchoKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "FaSST's calls";
    const SUMMARY: &'static str = "each operation is a batch of calls";
    const FAMILY: Family = Family::Calls;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CALLS;

    type Client<F: Fabric + Clock> = Echo<F>;

    fn parameters(_sizing: &Sizing) -> String {
        "{}".into()
    }

    fn footprint(_sizing: &Sizing) -> Result<Footprint, SizingError> {
        Ok(Footprint { slots: 0, table_bytes: TABLE_LEN, item_bytes: 0 })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(EchoKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<Echo<F>, StoreError> {
        members.check::<Self>(&fabric)?;
        let to =
            members.whole()?.into_iter().map(|(node, store)| Destination { node, key: store.extent().key });
        Ok(Echo { fabric, members: to.collect(), batch: Batch::new(1, 0), asked: Vec::new(), number: 0 })
    }
}

struct EchoService;

impl<M: Memory> Service<M> for EchoService {
    /// Answers anyone who holds the store's key, because a caller gets no bytes of others.
    fn call(
        &self,
        context: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        handlers::<M>().serve(&(), context.memory, call.request, answer)
    }

    /// Requests read and change nothing, so they run together.
    fn locks(&self, _work: Work<'_>) -> Locks {
        Locks::NONE
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // There are no buffers.
    }
}

const fn handlers<M: Memory>() -> Handlers<(), M> {
    Handlers {
        of: |kind| {
            (kind == ECHO).then_some(Handler { changes: false, locks: |_, _, _| Locks::NONE, run: echo })
        },
        admits: |_, _, _, _| Ok(true),
    }
}

fn echo<M: Memory>(_: &(), _: &M, _: &Header, request: &[u8], out: &mut Vec<u8>) -> Handled<M::Wait> {
    let Some((&[a, b, c, d, e, f, g, h], _)) = request.split_first_chunk() else {
        return Ok(Err("the request is malformed: use the same release on both sides".into()));
    };
    let (number, len) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
    let len = len as usize;
    if !(LEN_MIN..=LEN_MAX).contains(&len) {
        return Ok(Err(format!("a response of {len} bytes is not possible: ask for {LEN_MIN} to {LEN_MAX}")));
    }
    let end = out.len() + len;
    out.extend_from_slice(&number.to_le_bytes());
    out.resize(end, filler(number));
    Ok(Ok(DONE))
}

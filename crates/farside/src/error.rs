//! The crate's error type.

use farside_fabrics::memory::MappingError;
use farside_fabrics::session::endpoint::OpenError;
use farside_fabrics::shm::ConnectError;
#[cfg(feature = "tls")]
use farside_fabrics::tcp::tls;
#[cfg(feature = "verbs")]
use farside_fabrics::verbs::VerbsError;
use farside_node::host::BindError;
use farside_remote::FabricError;
use farside_remote::fabric::Ran;
use farside_systems::blocks::BlocksError;
use farside_systems::index::IndexError;
use farside_systems::kv::KvError;
use farside_systems::store::StoreError;
use farside_systems::txn::TxnError;

/// The failure of a call to this crate.
///
/// The text of an error (its `Display`) states three things: the failure and its reason, what may be assumed now, and
/// the remedy. Programs use [`Error::ran`] to decide whether to retry.
///
/// # Example
///
/// ```no_run
/// use farside::Ran;
/// # fn main() -> Result<(), farside::Error> {
/// # let kv = farside::connect("local:")?.open("default")?;
/// if let Err(error) = kv.put("greeting", "hello").wait() {
///     match error.ran() {
///         Ran::No => println!("nothing was stored: {error}"),
///         Ran::Yes | Ran::Unknown => println!("the value may have been stored: {error}"),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The url is invalid, its host has no address, or the list of nodes that it names cannot be read. No node received
    /// anything.
    Url(String),
    /// The token is too long. No node received anything.
    Token(String),
    /// The certificates for `tls:` are missing or invalid, or this crate was built without TLS. No node received
    /// anything.
    Trust(String),
    /// The TLS connection to the node at this url could not be established. Nothing was carried out.
    #[cfg(feature = "tls")]
    Tls(String, tls::ConnectError),
    /// The RDMA connection to the node at this url could not be established. Nothing was carried out.
    #[cfg(feature = "verbs")]
    Verbs(String, VerbsError),
    /// The connection to a node on this host could not be established. Nothing was carried out.
    Connect(ConnectError),
    /// The session with the node at this url could not be opened. Nothing was carried out.
    Open(String, OpenError),
    /// The node in this process (`local:`) could not start to serve.
    Serve(BindError),
    /// The memory of the node in this process (`local:`) could not be mapped.
    Memory(MappingError),
    /// The node refused the request, or sent no response. [`Error::ran`] tells whether it was carried out.
    Fabric(FabricError),
    /// An operation on a store failed. [`Error::ran`] tells whether it was carried out.
    Kv(KvError),
    /// An operation on an index failed. [`Error::ran`] tells whether it was carried out.
    Index(IndexError),
    /// A transaction failed. [`Error::ran`] tells whether it may have been committed.
    Txn(TxnError),
    /// An operation on a volume failed. [`Error::ran`] tells whether it was carried out.
    Blocks {
        /// Error of the first block that failed, or of the first one that leaves open whether its block was written.
        error: BlocksError,
        /// Number of other blocks on which the operation was carried out.
        done: u64,
    },
    /// The request is not possible for this volume, or no such volume is possible. Nothing was changed.
    Volume(String),
    /// The client's thread has exited. Operations in flight at that moment may have been carried out.
    Closed,
    /// The operating system refused to start the client's thread. Nothing was carried out.
    Thread(std::io::Error),
}

impl Error {
    /// Returns whether the failed operation was carried out. A `get` changes nothing, whatever this returns.
    ///
    /// * [`Ran::No`]: the operation was not carried out and never will be. Retrying is safe.
    /// * [`Ran::Yes`]: the operation was carried out, and its outcome is lost.
    /// * [`Ran::Unknown`]: the operation may have been carried out, or may still be. The program must be correct in
    ///   both cases.
    ///
    /// Errors of connecting and opening return `No`. [`Error::Closed`] returns `Unknown`.
    pub fn ran(&self) -> Ran {
        match self {
            Error::Kv(error) => error.ran(),
            Error::Index(error) => error.ran(),
            Error::Txn(error) => error.ran(),
            Error::Fabric(error) => error.ran(),
            Error::Blocks { error, done: 0 } => error.ran(),
            Error::Blocks { .. } => Ran::Unknown,
            Error::Closed => Ran::Unknown,
            _ => Ran::No,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Url(reason) | Error::Token(reason) | Error::Trust(reason) | Error::Volume(reason) => {
                f.write_str(reason)
            }
            #[cfg(feature = "tls")]
            Error::Tls(url, error) => write!(f, "{url}: {error}"),
            #[cfg(feature = "verbs")]
            Error::Verbs(url, error) => write!(f, "{url}: {error}"),
            Error::Connect(error) => error.fmt(f),
            Error::Open(url, error) => write!(f, "{url}: {error}"),
            Error::Serve(error) => error.fmt(f),
            Error::Memory(error) => error.fmt(f),
            Error::Fabric(error) => error.fmt(f),
            Error::Kv(error) => error.fmt(f),
            Error::Index(error) => error.fmt(f),
            Error::Txn(error) => error.fmt(f),
            Error::Blocks { error, done: 0 } => error.fmt(f),
            Error::Blocks { error, done } => write!(f, "{error}; {done} other blocks were done before"),
            Error::Closed => f.write_str(
                "the client has stopped: the operation may or may not have been carried out (a read changes nothing); \
                 open another client",
            ),
            Error::Thread(error) => write!(f, "the client could not start its thread: {error}"),
        }
    }
}

impl std::error::Error for Error {}

macro_rules! from {
    ($($source:ty => $variant:ident),*) => {$(
        impl From<$source> for Error {
            fn from(source: $source) -> Error {
                Error::$variant(source)
            }
        }
    )*};
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Error {
        Error::Kv(error.into())
    }
}

from!(
    ConnectError => Connect,
    BindError => Serve,
    MappingError => Memory,
    FabricError => Fabric,
    KvError => Kv,
    IndexError => Index,
    TxnError => Txn
);

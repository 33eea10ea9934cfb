//! Why something has no result.

use farside_fabrics::memory::MappingError;
use farside_fabrics::session::endpoint::OpenError;
use farside_fabrics::shm::ConnectError;
#[cfg(feature = "tls")]
use farside_fabrics::tcp::tls;
use farside_node::host::BindError;
use farside_remote::FabricError;
use farside_remote::fabric::Ran;
use farside_systems::kv::KvError;
use farside_systems::store::StoreError;

/// Why something has no result. Its text says what failed, what may be assumed now, and what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The url is none.
    Url(String),
    /// The token is none that could be shown.
    Token(String),
    /// Nobody is trusted that a node over TLS could be, or that is not possible.
    Trust(String),
    /// There is no connection by TLS to the node at this url.
    #[cfg(feature = "tls")]
    Tls(String, tls::ConnectError),
    /// There is no connection.
    Connect(ConnectError),
    /// There is no session with the node at this url.
    Open(String, OpenError),
    /// A node cannot be served.
    Serve(BindError),
    /// There is no memory to serve.
    Memory(MappingError),
    /// The node refuses or has no answer.
    Fabric(FabricError),
    /// The store refuses or has no answer.
    Kv(KvError),
    /// The client's own thread has ended; what it was at may have been carried out.
    Closed,
    /// The system refuses a thread.
    Thread(std::io::Error),
}

impl Error {
    /// Whether an operation that failed so may have been carried out.
    pub fn ran(&self) -> Ran {
        match self {
            Error::Kv(error) => error.ran(),
            Error::Fabric(error) => error.ran(),
            Error::Closed => Ran::Unknown,
            _ => Ran::No,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Url(reason) | Error::Token(reason) | Error::Trust(reason) => f.write_str(reason),
            #[cfg(feature = "tls")]
            Error::Tls(url, error) => write!(f, "{url}: {error}"),
            Error::Connect(error) => error.fmt(f),
            Error::Open(url, error) => write!(f, "{url}: {error}"),
            Error::Serve(error) => error.fmt(f),
            Error::Memory(error) => error.fmt(f),
            Error::Fabric(error) => error.fmt(f),
            Error::Kv(error) => error.fmt(f),
            Error::Closed => f.write_str(
                "the client has ended, and the operation may or may not have been carried out (if it only reads, \
                 nothing is changed): open another",
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

from!(ConnectError => Connect, BindError => Serve, MappingError => Memory, FabricError => Fabric, KvError => Kv);

//! `info`: a node, or where this program's settings come from.

use super::{Done, StoreTarget, human_bytes};

/// Show a node, or where this program's settings come from.
#[derive(clap::Args)]
pub(super) struct Info {
    #[command(flatten)]
    target: StoreTarget,
    /// Show every setting and where it comes from instead
    #[arg(long)]
    config: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

impl Info {
    pub(super) fn run(self) -> Done {
        if self.config {
            let settings = self.target.settings()?;
            for (name, setting) in [("pool", settings.pool), ("store", settings.store)] {
                if self.json {
                    let object = serde_json::json!({
                        "name": name, "value": setting.value, "origin": setting.origin
                    });
                    tell!("{object}");
                } else {
                    tell!("{name:<8}{}  ({})", setting.value, setting.origin);
                }
            }
            return Ok(());
        }
        let (pool, _) = self.target.connect()?;
        let info = pool.info()?;
        if self.json {
            tell!("{}", serde_json::to_string(&info)?);
            return Ok(());
        }
        let rows = [
            ("release", info.version),
            ("process", info.pid.to_string()),
            ("memory", human_bytes(info.memory_bytes)),
            ("of no store", human_bytes(info.unassigned_bytes)),
            ("pages", human_bytes(info.page_size)),
            ("sessions", info.sessions.to_string()),
            ("buffers taken back", info.reclaimed_buffers.to_string()),
            ("buffers found lost", info.scanned_buffers.to_string()),
        ];
        for (name, value) in rows {
            tell!("{name:<22}{value}");
        }
        for store in pool.stores()? {
            tell!("store {:<16}{}, {}", store.name, store.kind, human_bytes(store.quota));
        }
        Ok(())
    }
}

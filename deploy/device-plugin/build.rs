//! Generates the gRPC services of the kubelet's device plugin API. Their messages are in
//! `src/api.rs`.

use tonic_build::manual::{Builder, Method, MethodBuilder, Service};

fn main() {
    let registration = Service::builder()
        .name("Registration")
        .package(PACKAGE)
        .method(method("register", "Register", "RegisterRequest", "Empty").build());
    let list = method("list_and_watch", "ListAndWatch", "Empty", "ListAndWatchResponse");
    let mut plugin = Service::builder()
        .name("DevicePlugin")
        .package(PACKAGE)
        .method(list.server_streaming().build());
    for (name, route, messages) in [
        ("allocate", "Allocate", "Allocate"),
        ("get_preferred_allocation", "GetPreferredAllocation", "PreferredAllocation"),
        ("pre_start_container", "PreStartContainer", "PreStartContainer"),
    ] {
        let [request, response] = ["Request", "Response"].map(|kind| format!("{messages}{kind}"));
        plugin = plugin.method(method(name, route, &request, &response).build());
    }
    let route = "GetDevicePluginOptions";
    let options = method("get_device_plugin_options", route, "Empty", "DevicePluginOptions");
    let plugin = plugin.method(options.build());
    Builder::new().compile(&[registration.build(), plugin.build()]);
    println!("cargo::rerun-if-changed=build.rs");
}

/// Returns a method with messages of `src/api.rs`.
fn method(name: &str, route: &str, input: &str, output: &str) -> MethodBuilder {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::api::{input}"))
        .output_type(format!("crate::api::{output}"))
        .codec_path("tonic_prost::ProstCodec")
}

/// Package of the API in the kubelet.
const PACKAGE: &str = "v1beta1";

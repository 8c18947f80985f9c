//! Names and shapes of public models, from the geometry in their configs.

/// A tensor by name and shape.
pub(crate) type Tensor = (String, Vec<u64>);

/// A list of tensors under construction.
#[derive(Default)]
pub(crate) struct Model(pub(crate) Vec<Tensor>);

impl Model {
    fn add(&mut self, name: impl Into<String>, shape: &[u64]) {
        self.0.push((name.into(), shape.to_vec()));
    }

    /// `name.weight` and, as the second argument says, `name.bias`.
    fn linear(&mut self, name: &str, bias: bool, shape: &[u64]) {
        self.add(format!("{name}.weight"), shape);
        if bias {
            self.add(format!("{name}.bias"), &shape[..1]);
        }
    }

    fn norm(&mut self, name: &str, bias: bool, width: u64) {
        self.linear(name, bias, &[width]);
    }

    fn linears(&mut self, prefix: &str, bias: bool, parts: &[(&str, u64, u64)]) {
        for &(part, rows, columns) in parts {
            self.linear(&format!("{prefix}.{part}"), bias, &[rows, columns]);
        }
    }

    fn gated(&mut self, prefix: &str, width: u64, inner: u64) {
        self.linears(
            prefix,
            false,
            &[("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)],
        );
    }

    fn attention(&mut self, prefix: &str, width: u64, queries: u64, keys: u64) {
        let parts = [
            ("q_proj", queries, width),
            ("k_proj", keys, width),
            ("v_proj", keys, width),
            ("o_proj", width, queries),
        ];
        self.linears(prefix, false, &parts);
    }

    fn llama_norms(&mut self, layer: &str, width: u64) {
        self.norm(&format!("{layer}.input_layernorm"), false, width);
        self.norm(&format!("{layer}.post_attention_layernorm"), false, width);
    }

    fn ends(&mut self, width: u64, vocabulary: u64) {
        self.linear("model.embed_tokens", false, &[vocabulary, width]);
        self.norm("model.norm", false, width);
        self.linear("lm_head", false, &[vocabulary, width]);
    }
}

pub(crate) fn llama_8b() -> Model {
    let mut m = Model::default();
    for layer in (0..32).map(|n| format!("model.layers.{n}")) {
        m.attention(&format!("{layer}.self_attn"), 4096, 4096, 1024);
        m.gated(&format!("{layer}.mlp"), 4096, 14336);
        m.llama_norms(&layer, 4096);
    }
    m.ends(4096, 128_256);
    m
}

pub(crate) fn phi3_mini() -> Model {
    let mut m = Model::default();
    for layer in (0..32).map(|n| format!("model.layers.{n}")) {
        m.linears(
            &format!("{layer}.self_attn"),
            false,
            &[("qkv_proj", 9216, 3072), ("o_proj", 3072, 3072)],
        );
        m.linears(
            &format!("{layer}.mlp"),
            false,
            &[("gate_up_proj", 16384, 3072), ("down_proj", 3072, 8192)],
        );
        m.llama_norms(&layer, 3072);
    }
    m.ends(3072, 32064);
    m
}

pub(crate) fn qwen3_30b_a3b() -> Model {
    let mut m = Model::default();
    for layer in (0..48).map(|n| format!("model.layers.{n}")) {
        m.attention(&format!("{layer}.self_attn"), 2048, 4096, 512);
        m.norm(&format!("{layer}.self_attn.q_norm"), false, 128);
        m.norm(&format!("{layer}.self_attn.k_norm"), false, 128);
        m.linear(&format!("{layer}.mlp.gate"), false, &[128, 2048]);
        for expert in 0..128 {
            m.gated(&format!("{layer}.mlp.experts.{expert}"), 2048, 768);
        }
        m.llama_norms(&layer, 2048);
    }
    m.ends(2048, 151_936);
    m
}

pub(crate) fn mixtral_8x7b() -> Model {
    let mut m = Model::default();
    for layer in (0..32).map(|n| format!("model.layers.{n}")) {
        m.attention(&format!("{layer}.self_attn"), 4096, 4096, 1024);
        m.linear(&format!("{layer}.block_sparse_moe.gate"), false, &[8, 4096]);
        for expert in 0..8 {
            let parts = [("w1", 14336, 4096), ("w2", 4096, 14336), ("w3", 14336, 4096)];
            m.linears(&format!("{layer}.block_sparse_moe.experts.{expert}"), false, &parts);
        }
        m.llama_norms(&layer, 4096);
    }
    m.ends(4096, 32000);
    m
}

/// With its FP8 scales, and the layer for multi-token prediction at index 61.
pub(crate) fn deepseek_v3() -> Model {
    let mut m = Model::default();
    for n in 0..62 {
        let layer = format!("model.layers.{n}");
        let parts = [
            ("q_a_proj", 1536, 7168),
            ("q_b_proj", 24576, 1536),
            ("kv_a_proj_with_mqa", 576, 7168),
            ("kv_b_proj", 32768, 512),
            ("o_proj", 7168, 16384),
        ];
        m.linears(&format!("{layer}.self_attn"), false, &parts);
        for (part, rows, columns) in parts {
            m.add(
                format!("{layer}.self_attn.{part}.weight_scale_inv"),
                &[rows / 128, columns / 128],
            );
        }
        m.norm(&format!("{layer}.self_attn.q_a_layernorm"), false, 1536);
        m.norm(&format!("{layer}.self_attn.kv_a_layernorm"), false, 512);
        m.llama_norms(&layer, 7168);
        if n < 3 {
            m.gated(&format!("{layer}.mlp"), 7168, 18432);
            continue;
        }
        m.linear(&format!("{layer}.mlp.gate"), false, &[256, 7168]);
        m.add(format!("{layer}.mlp.gate.e_score_correction_bias"), &[256]);
        m.gated(&format!("{layer}.mlp.shared_experts"), 7168, 2048);
        for expert in 0..256 {
            m.gated(&format!("{layer}.mlp.experts.{expert}"), 7168, 2048);
        }
    }
    m.linear("model.layers.61.embed_tokens", false, &[129_280, 7168]);
    m.linear("model.layers.61.eh_proj", false, &[7168, 14336]);
    m.norm("model.layers.61.enorm", false, 7168);
    m.linear("model.layers.61.shared_head.head", false, &[129_280, 7168]);
    m.norm("model.layers.61.shared_head.norm", false, 7168);
    m.ends(7168, 129_280);
    m
}

/// A mixture of experts with a lone layer for multi-token prediction, as in Qwen3-Next.
pub(crate) fn qwen3_next() -> Model {
    let mut m = Model::default();
    for n in (0..48).map(Some).chain([None]) {
        let layer = n.map_or("mtp.layers.0".to_owned(), |n| format!("model.layers.{n}"));
        if n.is_some_and(|n| n % 4 != 3) {
            m.linears(
                &format!("{layer}.linear_attn"),
                false,
                &[
                    ("in_proj_qkvz", 12288, 2048),
                    ("in_proj_ba", 64, 2048),
                    ("out_proj", 2048, 4096),
                ],
            );
            m.add(format!("{layer}.linear_attn.A_log"), &[32]);
            m.add(format!("{layer}.linear_attn.conv1d.weight"), &[8192, 1, 4]);
        } else {
            m.attention(&format!("{layer}.self_attn"), 2048, 8192, 512);
        }
        m.linear(&format!("{layer}.mlp.gate"), false, &[512, 2048]);
        m.gated(&format!("{layer}.mlp.shared_expert"), 2048, 512);
        for expert in 0..512 {
            m.gated(&format!("{layer}.mlp.experts.{expert}"), 2048, 512);
        }
        m.llama_norms(&layer, 2048);
    }
    m.linear("mtp.fc", false, &[2048, 4096]);
    m.norm("mtp.norm", false, 2048);
    m.ends(2048, 151_936);
    m
}

/// Gemma 3 4B with its vision tower.
pub(crate) fn gemma3_4b() -> Model {
    let mut m = Model::default();
    for layer in (0..34).map(|n| format!("language_model.model.layers.{n}")) {
        m.attention(&format!("{layer}.self_attn"), 2560, 2048, 1024);
        m.norm(&format!("{layer}.self_attn.q_norm"), false, 256);
        m.norm(&format!("{layer}.self_attn.k_norm"), false, 256);
        m.gated(&format!("{layer}.mlp"), 2560, 10240);
        m.llama_norms(&layer, 2560);
        m.norm(&format!("{layer}.pre_feedforward_layernorm"), false, 2560);
        m.norm(&format!("{layer}.post_feedforward_layernorm"), false, 2560);
    }
    m.linear("language_model.model.embed_tokens", false, &[262_208, 2560]);
    m.norm("language_model.model.norm", false, 2560);
    m.clip_layers("vision_tower.vision_model.encoder.layers", 27, 1152, 4304);
    m.linear("vision_tower.vision_model.embeddings.patch_embedding", true, &[1152, 3, 14, 14]);
    m.linear("vision_tower.vision_model.embeddings.position_embedding", false, &[4096, 1152]);
    m.norm("vision_tower.vision_model.post_layernorm", true, 1152);
    m.add("multi_modal_projector.mm_input_projection_weight", &[1152, 2560]);
    m.norm("multi_modal_projector.mm_soft_emb_norm", false, 1152);
    m
}

impl Model {
    fn clip_layers(&mut self, prefix: &str, count: u64, width: u64, inner: u64) {
        for layer in (0..count).map(|n| format!("{prefix}.{n}")) {
            for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
                self.linear(&format!("{layer}.self_attn.{part}"), true, &[width, width]);
            }
            self.linears(
                &format!("{layer}.mlp"),
                true,
                &[("fc1", inner, width), ("fc2", width, inner)],
            );
            self.norm(&format!("{layer}.layer_norm1"), true, width);
            self.norm(&format!("{layer}.layer_norm2"), true, width);
        }
    }
}

pub(crate) fn clip_l() -> Model {
    let mut m = Model::default();
    m.add("logit_scale", &[]);
    m.clip_layers("text_model.encoder.layers", 12, 768, 3072);
    m.clip_layers("vision_model.encoder.layers", 24, 1024, 4096);
    m.linear("text_model.embeddings.token_embedding", false, &[49408, 768]);
    m.linear("text_model.embeddings.position_embedding", false, &[77, 768]);
    m.norm("text_model.final_layer_norm", true, 768);
    m.add("vision_model.embeddings.class_embedding", &[1024]);
    m.linear("vision_model.embeddings.patch_embedding", false, &[1024, 3, 14, 14]);
    m.linear("vision_model.embeddings.position_embedding", false, &[257, 1024]);
    m.norm("vision_model.pre_layrnorm", true, 1024);
    m.norm("vision_model.post_layernorm", true, 1024);
    m.linear("visual_projection", false, &[768, 1024]);
    m.linear("text_projection", false, &[768, 768]);
    m
}

pub(crate) fn gpt2() -> Model {
    let mut m = Model::default();
    m.linear("wte", false, &[50257, 768]);
    m.linear("wpe", false, &[1024, 768]);
    for layer in (0..12).map(|n| format!("h.{n}")) {
        m.norm(&format!("{layer}.ln_1"), true, 768);
        m.linears(&format!("{layer}.attn"), true, &[("c_attn", 768, 2304), ("c_proj", 768, 768)]);
        m.add(format!("{layer}.attn.bias"), &[1, 1, 1024, 1024]);
        m.norm(&format!("{layer}.ln_2"), true, 768);
        m.linears(&format!("{layer}.mlp"), true, &[("c_fc", 768, 3072), ("c_proj", 3072, 768)]);
    }
    m.norm("ln_f", true, 768);
    m
}

/// Flan-T5 base.
pub(crate) fn flan_t5() -> Model {
    let mut m = Model::default();
    m.linear("shared", false, &[32128, 768]);
    for tower in ["encoder", "decoder"] {
        for n in 0..12 {
            let block = format!("{tower}.block.{n}.layer");
            let mut attentions = vec!["SelfAttention"];
            attentions.extend((tower == "decoder").then_some("EncDecAttention"));
            for (index, attention) in attentions.iter().enumerate() {
                let parts = [("q", 768, 768), ("k", 768, 768), ("v", 768, 768), ("o", 768, 768)];
                m.linears(&format!("{block}.{index}.{attention}"), false, &parts);
                m.norm(&format!("{block}.{index}.layer_norm"), false, 768);
            }
            if n == 0 {
                m.linear(
                    &format!("{block}.0.SelfAttention.relative_attention_bias"),
                    false,
                    &[32, 12],
                );
            }
            let last = format!("{block}.{}", attentions.len());
            m.linears(
                &format!("{last}.DenseReluDense"),
                false,
                &[("wi_0", 2048, 768), ("wi_1", 2048, 768), ("wo", 768, 2048)],
            );
            m.norm(&format!("{last}.layer_norm"), false, 768);
        }
        m.norm(&format!("{tower}.final_layer_norm"), false, 768);
    }
    m.linear("lm_head", false, &[32128, 768]);
    m
}

/// all-MiniLM-L6-v2, whose names sentence-transformers prefixes with the index of the module.
pub(crate) fn mini_lm(prefix: &str) -> Model {
    let mut m = Model::default();
    m.bert_layers(&format!("{prefix}encoder.layer"), 6, 384, 1536);
    for (part, rows) in [("word", 30522), ("position", 512), ("token_type", 2)] {
        m.linear(&format!("{prefix}embeddings.{part}_embeddings"), false, &[rows, 384]);
    }
    m.norm(&format!("{prefix}embeddings.LayerNorm"), true, 384);
    m.linear(&format!("{prefix}pooler.dense"), true, &[384, 384]);
    m
}

/// The same with the dense module that some sentence encoders put after it.
pub(crate) fn mini_lm_with_head() -> Model {
    let mut m = mini_lm("0.auto_model.");
    m.linear("2.linear", true, &[512, 384]);
    m
}

impl Model {
    fn bert_layers(&mut self, prefix: &str, count: u64, width: u64, inner: u64) {
        for layer in (0..count).map(|n| format!("{prefix}.{n}")) {
            for part in ["self.query", "self.key", "self.value", "output.dense"] {
                self.linear(&format!("{layer}.attention.{part}"), true, &[width, width]);
            }
            self.norm(&format!("{layer}.attention.output.LayerNorm"), true, width);
            self.linear(&format!("{layer}.intermediate.dense"), true, &[inner, width]);
            self.linear(&format!("{layer}.output.dense"), true, &[width, inner]);
            self.norm(&format!("{layer}.output.LayerNorm"), true, width);
        }
    }
}

/// A base vision transformer, or with `scales` its `DINOv2` form, which differs in its layer scales
/// and names.
pub(crate) fn vit(prefix: &str, scales: bool) -> Model {
    let mut m = Model::default();
    m.add(format!("{prefix}embeddings.cls_token"), &[1, 1, 768]);
    m.add(format!("{prefix}embeddings.position_embeddings"), &[1, 197, 768]);
    m.linear(&format!("{prefix}embeddings.patch_embeddings.projection"), true, &[768, 3, 16, 16]);
    for layer in (0..12).map(|n| format!("{prefix}encoder.layer.{n}")) {
        for part in ["attention.query", "attention.key", "attention.value", "output.dense"] {
            m.linear(&format!("{layer}.attention.{part}"), true, &[768, 768]);
        }
        if scales {
            m.add(format!("{layer}.layer_scale1.lambda1"), &[768]);
            m.add(format!("{layer}.layer_scale2.lambda1"), &[768]);
        }
        m.linears(&format!("{layer}.mlp"), true, &[("fc1", 3072, 768), ("fc2", 768, 3072)]);
        m.norm(&format!("{layer}.norm1"), true, 768);
        m.norm(&format!("{layer}.norm2"), true, 768);
    }
    m.norm(&format!("{prefix}layernorm"), true, 768);
    m
}

/// A base vision transformer as torchvision names it: the index is glued to a name.
pub(crate) fn torchvision_vit() -> Model {
    let mut m = Model::default();
    m.add("class_token", &[1, 1, 768]);
    m.add("encoder.pos_embedding", &[1, 197, 768]);
    m.linear("conv_proj", true, &[768, 3, 16, 16]);
    for layer in (0..12).map(|n| format!("encoder.layers.encoder_layer_{n}")) {
        m.norm(&format!("{layer}.ln_1"), true, 768);
        m.add(format!("{layer}.self_attention.in_proj_weight"), &[2304, 768]);
        m.linear(&format!("{layer}.self_attention.out_proj"), true, &[768, 768]);
        m.linears(&format!("{layer}.mlp"), true, &[("0", 3072, 768), ("3", 768, 3072)]);
    }
    m.norm("encoder.ln", true, 768);
    m.linear("heads.head", true, &[1000, 768]);
    m
}

pub(crate) fn whisper_large() -> Model {
    let mut m = Model::default();
    m.clip_layers("model.encoder.layers", 32, 1280, 5120);
    m.clip_layers("model.decoder.layers", 32, 1280, 5120);
    for layer in (0..32).map(|n| format!("model.decoder.layers.{n}")) {
        for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            m.linear(&format!("{layer}.encoder_attn.{part}"), true, &[1280, 1280]);
        }
        m.norm(&format!("{layer}.encoder_attn_layer_norm"), true, 1280);
    }
    m.linear("model.encoder.conv1", true, &[1280, 128, 3]);
    m.linear("model.encoder.conv2", true, &[1280, 1280, 3]);
    m.linear("model.encoder.embed_positions", false, &[1500, 1280]);
    m.norm("model.encoder.layer_norm", true, 1280);
    m.linear("model.decoder.embed_tokens", false, &[51866, 1280]);
    m.linear("model.decoder.embed_positions", false, &[448, 1280]);
    m.norm("model.decoder.layer_norm", true, 1280);
    m
}

pub(crate) fn mamba_2_8b() -> Model {
    let mut m = Model::default();
    m.linear("backbone.embeddings", false, &[50280, 2560]);
    for layer in (0..64).map(|n| format!("backbone.layers.{n}")) {
        m.add(format!("{layer}.mixer.A_log"), &[5120, 16]);
        m.add(format!("{layer}.mixer.D"), &[5120]);
        m.linear(&format!("{layer}.mixer.conv1d"), true, &[5120, 1, 4]);
        m.linears(
            &format!("{layer}.mixer"),
            false,
            &[("in_proj", 10240, 2560), ("x_proj", 192, 5120), ("out_proj", 2560, 5120)],
        );
        m.linear(&format!("{layer}.mixer.dt_proj"), true, &[5120, 160]);
        m.norm(&format!("{layer}.norm"), false, 2560);
    }
    m.norm("backbone.norm_f", false, 2560);
    m
}

pub(crate) fn flux_dev() -> Model {
    let mut m = Model::default();
    let w = 3072;
    m.linear("x_embedder", true, &[w, 64]);
    m.linear("context_embedder", true, &[w, 4096]);
    for part in ["timestep", "guidance", "text"] {
        let name = format!("time_text_embed.{part}_embedder");
        m.linears(&name, true, &[("linear_1", w, 256), ("linear_2", w, w)]);
    }
    for block in (0..19).map(|n| format!("transformer_blocks.{n}")) {
        m.joint_block(&block, w, 128);
    }
    for block in (0..38).map(|n| format!("single_transformer_blocks.{n}")) {
        m.linears(
            &format!("{block}.attn"),
            true,
            &[("to_q", w, w), ("to_k", w, w), ("to_v", w, w)],
        );
        m.norm(&format!("{block}.attn.norm_q"), false, 128);
        m.norm(&format!("{block}.attn.norm_k"), false, 128);
        m.linear(&format!("{block}.norm.linear"), true, &[3 * w, w]);
        m.linears(&block, true, &[("proj_mlp", 4 * w, w), ("proj_out", w, 5 * w)]);
    }
    m.linear("norm_out.linear", true, &[2 * w, w]);
    m.linear("proj_out", true, &[64, w]);
    m
}

impl Model {
    fn joint_block(&mut self, block: &str, w: u64, head: u64) {
        for part in [
            "to_q",
            "to_k",
            "to_v",
            "add_q_proj",
            "add_k_proj",
            "add_v_proj",
            "to_out.0",
            "to_add_out",
        ] {
            self.linear(&format!("{block}.attn.{part}"), true, &[w, w]);
        }
        for part in ["norm_q", "norm_k", "norm_added_q", "norm_added_k"] {
            self.norm(&format!("{block}.attn.{part}"), false, head);
        }
        for part in ["ff", "ff_context"] {
            self.linear(&format!("{block}.{part}.net.0.proj"), true, &[4 * w, w]);
            self.linear(&format!("{block}.{part}.net.2"), true, &[w, 4 * w]);
        }
        self.linear(&format!("{block}.norm1.linear"), true, &[6 * w, w]);
        self.linear(&format!("{block}.norm1_context.linear"), true, &[6 * w, w]);
    }
}

pub(crate) fn sd35_large() -> Model {
    let mut m = Model::default();
    let w = 2432;
    for block in (0..38).map(|n| format!("transformer_blocks.{n}")) {
        m.joint_block(&block, w, 64);
    }
    m.linear("context_embedder", true, &[w, 4096]);
    m.linear("pos_embed.proj", true, &[w, 16, 2, 2]);
    m.add("pos_embed.pos_embed", &[1, 36864, w]);
    for (part, inner) in [("timestep", 256), ("text", 2048)] {
        let name = format!("time_text_embed.{part}_embedder");
        m.linears(&name, true, &[("linear_1", w, inner), ("linear_2", w, w)]);
    }
    m.linear("norm_out.linear", true, &[2 * w, w]);
    m.linear("proj_out", true, &[64, w]);
    m
}

pub(crate) fn sdxl_unet() -> Model {
    let mut m = Model::default();
    m.linear("conv_in", true, &[320, 4, 3, 3]);
    m.linears("time_embedding", true, &[("linear_1", 1280, 320), ("linear_2", 1280, 1280)]);
    m.linears("add_embedding", true, &[("linear_1", 1280, 2816), ("linear_2", 1280, 1280)]);
    for (n, input, width, depth) in [(0, 320, 320, 0), (1, 320, 640, 2), (2, 640, 1280, 10)] {
        m.unet_stage(&format!("down_blocks.{n}"), &[input, width], width, depth);
        if n < 2 {
            m.linear(&format!("down_blocks.{n}.downsamplers.0.conv"), true, &[width, width, 3, 3]);
        }
    }
    m.unet_stage("mid_block", &[1280, 1280], 1280, 0);
    m.unet_attention("mid_block.attentions.0", 1280, 10);
    for (n, inputs, width, depth) in [
        (0, [2560, 2560, 1920], 1280, 10),
        (1, [1920, 1280, 960], 640, 2),
        (2, [960, 640, 640], 320, 0),
    ] {
        m.unet_stage(&format!("up_blocks.{n}"), &inputs, width, depth);
        if n < 2 {
            m.linear(&format!("up_blocks.{n}.upsamplers.0.conv"), true, &[width, width, 3, 3]);
        }
    }
    m.norm("conv_norm_out", true, 320);
    m.linear("conv_out", true, &[4, 320, 3, 3]);
    m
}

impl Model {
    fn unet_stage(&mut self, stage: &str, inputs: &[u64], width: u64, depth: u64) {
        for (n, &input) in inputs.iter().enumerate() {
            let resnet = format!("{stage}.resnets.{n}");
            self.norm(&format!("{resnet}.norm1"), true, input);
            self.linear(&format!("{resnet}.conv1"), true, &[width, input, 3, 3]);
            self.linear(&format!("{resnet}.time_emb_proj"), true, &[width, 1280]);
            self.norm(&format!("{resnet}.norm2"), true, width);
            self.linear(&format!("{resnet}.conv2"), true, &[width, width, 3, 3]);
            if input != width {
                self.linear(&format!("{resnet}.conv_shortcut"), true, &[width, input, 1, 1]);
            }
            if depth > 0 {
                self.unet_attention(&format!("{stage}.attentions.{n}"), width, depth);
            }
        }
    }

    fn unet_attention(&mut self, name: &str, w: u64, depth: u64) {
        self.norm(&format!("{name}.norm"), true, w);
        self.linears(name, true, &[("proj_in", w, w), ("proj_out", w, w)]);
        for block in (0..depth).map(|n| format!("{name}.transformer_blocks.{n}")) {
            for (attention, context) in [("attn1", w), ("attn2", 2048)] {
                let parts = [("to_q", w, w), ("to_k", w, context), ("to_v", w, context)];
                self.linears(&format!("{block}.{attention}"), false, &parts);
                self.linear(&format!("{block}.{attention}.to_out.0"), true, &[w, w]);
            }
            self.linear(&format!("{block}.ff.net.0.proj"), true, &[8 * w, w]);
            self.linear(&format!("{block}.ff.net.2"), true, &[w, 4 * w]);
            for norm in 1..=3 {
                self.norm(&format!("{block}.norm{norm}"), true, w);
            }
        }
    }
}

/// Swin tiny: stages of blocks.
pub(crate) fn swin_tiny() -> Model {
    let mut m = Model::default();
    m.linear("patch_embed.proj", true, &[96, 3, 4, 4]);
    m.norm("patch_embed.norm", true, 96);
    for (stage, depth) in [2, 2, 6, 2].into_iter().enumerate() {
        let w = 96 << stage;
        for block in (0..depth).map(|n| format!("layers.{stage}.blocks.{n}")) {
            m.norm(&format!("{block}.norm1"), true, w);
            m.linears(&format!("{block}.attn"), true, &[("qkv", 3 * w, w), ("proj", w, w)]);
            m.add(format!("{block}.attn.relative_position_bias_table"), &[169, w / 32]);
            m.norm(&format!("{block}.norm2"), true, w);
            m.linears(&format!("{block}.mlp"), true, &[("fc1", 4 * w, w), ("fc2", w, 4 * w)]);
        }
        if stage < 3 {
            m.norm(&format!("layers.{stage}.downsample.norm"), true, 4 * w);
            m.linear(&format!("layers.{stage}.downsample.reduction"), false, &[2 * w, 4 * w]);
        }
    }
    m.norm("norm", true, 768);
    m.linear("head", true, &[1000, 768]);
    m
}

/// ResNet-18: flat blocks in stages whose numbers are glued to a name.
pub(crate) fn resnet18() -> Model {
    let mut m = Model::default();
    m.linear("conv1", false, &[64, 3, 7, 7]);
    m.norm("bn1", true, 64);
    for stage in 0..4 {
        let w = 64 << stage;
        for n in 0..2 {
            let block = format!("layer{}.{n}", stage + 1);
            let input = if n == 0 && stage > 0 { w / 2 } else { w };
            m.linear(&format!("{block}.conv1"), false, &[w, input, 3, 3]);
            m.norm(&format!("{block}.bn1"), true, w);
            m.linear(&format!("{block}.conv2"), false, &[w, w, 3, 3]);
            m.norm(&format!("{block}.bn2"), true, w);
            if input != w {
                m.linear(&format!("{block}.downsample.0"), false, &[w, input, 1, 1]);
                m.norm(&format!("{block}.downsample.1"), true, w);
            }
        }
    }
    m.linear("fc", true, &[1000, 512]);
    m
}

/// Two encoders of the same kind, told apart by a number.
pub(crate) fn two_numbered_towers() -> Model {
    let (mut m, one) = (Model::default(), mini_lm(""));
    for tower in 0..2 {
        m.0.extend(
            one.0.iter().map(|(name, shape)| (format!("model.{tower}.{name}"), shape.clone())),
        );
    }
    m
}

/// A mixture of experts whose matrices are quantized: several matrices make up one layer of an
/// expert.
pub(crate) fn quantized_mixtral() -> Model {
    let mut m = Model::default();
    for (name, shape) in mixtral_8x7b().0 {
        match name
            .strip_suffix(".weight")
            .filter(|name| name.contains("experts") || name.contains("_proj"))
        {
            Some(name) => {
                m.add(format!("{name}.qweight"), &[shape[1], shape[0] / 8]);
                m.add(format!("{name}.qzeros"), &[shape[1] / 128, shape[0] / 8]);
                m.add(format!("{name}.scales"), &[shape[1] / 128, shape[0]]);
            }
            None => m.add(name, &shape),
        }
    }
    m
}

/// Nemotron-H 8B: each layer is one of three kinds.
pub(crate) fn nemotron_h() -> Model {
    let mut m = Model::default();
    let pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-";
    for (n, kind) in pattern.chars().enumerate() {
        let mixer = format!("backbone.layers.{n}.mixer");
        match kind {
            'M' => {
                m.add(format!("{mixer}.A_log"), &[128]);
                m.linear(&format!("{mixer}.conv1d"), true, &[10240, 1, 4]);
                m.norm(&format!("{mixer}.norm"), false, 8192);
                m.linears(&mixer, false, &[("in_proj", 18560, 4096), ("out_proj", 4096, 8192)]);
            }
            '*' => m.attention(&mixer, 4096, 4096, 1024),
            _ => m.linears(&mixer, false, &[("up_proj", 21504, 4096), ("down_proj", 4096, 21504)]),
        }
        m.norm(&format!("backbone.layers.{n}.norm"), false, 4096);
    }
    m.linear("backbone.embeddings", false, &[131_072, 4096]);
    m.norm("backbone.norm_f", false, 4096);
    m.linear("lm_head", false, &[131_072, 4096]);
    m
}

/// The decoder of a diffusion VAE: flat blocks in stages.
pub(crate) fn vae_decoder() -> Model {
    let mut m = Model::default();
    m.linear("decoder.conv_in", true, &[512, 16, 3, 3]);
    let stages =
        [("mid_block", 512, 512, 2), ("up_blocks.0", 512, 512, 3), ("up_blocks.1", 512, 512, 3)];
    for (stage, input, width, count) in
        stages.into_iter().chain([("up_blocks.2", 512, 256, 3), ("up_blocks.3", 256, 128, 3)])
    {
        for n in 0..count {
            let (resnet, input) =
                (format!("decoder.{stage}.resnets.{n}"), if n == 0 { input } else { width });
            m.norm(&format!("{resnet}.norm1"), true, input);
            m.linear(&format!("{resnet}.conv1"), true, &[width, input, 3, 3]);
            m.norm(&format!("{resnet}.norm2"), true, width);
            m.linear(&format!("{resnet}.conv2"), true, &[width, width, 3, 3]);
        }
    }
    for part in ["to_q", "to_k", "to_v", "to_out.0"] {
        m.linear(&format!("decoder.mid_block.attentions.0.{part}"), true, &[512, 512]);
    }
    m.linear("decoder.conv_out", true, &[3, 128, 3, 3]);
    m
}
